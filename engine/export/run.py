"""The work of export.py: a checkpoint to files of other runtimes, each checked against the checkpoint."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_spec import DatasetSpec, DataSource
from engine.export.formats import (
    build_onnx,
    build_openvino,
    build_pt2,
    build_torchscript,
    example_images,
    required_runtime,
    write_onnx,
    write_openvino,
    write_torch,
)
from engine.export.int8 import activation_ranges, quantize
from engine.export.layouts import make_layout
from engine.export.options import require_packages, resolve_options
from engine.export.parity import FLOAT16, FLOAT32, INT8, Reference, calibration_images, largest_difference, spread
from engine.inference.model import CheckpointModel
from engine.inference.model_data import open_for_model
from engine.inference.runtimes.metadata import ExportMetadata
from engine.inference.runtimes.open import OPENVINO_FOLDER, is_exported, open_model
from models.detector import Detector
from models.weights.download import fetch_weights, origin_of
from models.weights.load import load_detector
from utils.config.settings import ExportConfig, TrainConfig
from utils.distributed.agreement import product_version
from utils.distributed.context import DistributedContext
from utils.errors import FailedCheck, UserError, first_line
from utils.files.folders import describe_location, file_bytes, replace_path, temporary_folder
from utils.logger import configure_logging, get_logger
from utils.machine.limits import explanation
from utils.machine.packages import require_installed
from utils.program import VERSION
from utils.strings import counted

if TYPE_CHECKING:
    from onnx import ModelProto

CPU = torch.device("cpu")


def export(config: ExportConfig) -> list[Path]:
    """Exports ``config.weights`` in each format; returns the files. They lie next to the weights.

    A format that fails does not keep others from being written; a UserError at the end names it. A file that differs
    too much from the checkpoint is kept as NAME.failed, and the error is a FailedCheck.
    """
    configure_logging(True)
    require_packages(config.format)
    if config.int8:
        require_installed(["onnxruntime"], "--int8", "leave it out")
    if is_exported(config.weights):
        raise UserError(f"{config.weights}: is exported already; name a checkpoint")
    ctx = DistributedContext.single(CPU)
    weights = fetch_weights(config.weights, ctx=ctx, offline=config.offline)
    detector, info = load_detector(weights)
    if config.nms and not detector.head.is_dual:
        raise UserError(f"--nms: {weights} has one branch; leave it out")
    fused = detector.fuse(one_to_one=not config.nms)
    config = resolve_options(config, fused, info["imgsz"])
    model = CheckpointModel(fused, info, weights, CPU)
    spec = None
    if config.check or config.int8:
        instead = "" if config.int8 else ", or export without a check with --no-check"
        source = DataSource(config.data, cache_dir=config.cache_dir)
        spec = open_for_model(model, source, ctx, single_cls=bool(model.stored("single_cls")), instead=instead)
    job = _Job(config, detector, model, spec)
    # What all formats need of the data set is read first, so that its errors are reported once.
    if config.int8 and (count := len(job.calibration_split)) < config.batch:
        raise UserError(f"--batch {config.batch}: is more than there are images to calibrate --int8 with ({count})")
    if config.check:
        _ = job.reference
    done: list[Path] = []
    failed: dict[str, Exception] = {}
    formats = list(dict.fromkeys(config.format))
    for name in formats:
        try:
            done.append(job.run(name))
        except Exception as error:
            if len(formats) == 1:
                raise
            failed[name] = error
            get_logger().warning("%s: %s", name, _summary(error))
    if failed:
        name, error = next(iter(failed.items()))
        kind = FailedCheck if all(isinstance(e, FailedCheck) for e in failed.values()) else UserError
        raise kind(f"{len(failed)} of {len(formats)} formats failed (first: {name}: {_summary(error)})")
    return done


def export_best(best: Path, config: TrainConfig) -> None:
    """Exports ``best``, the run's best checkpoint, after the last epoch (``--export``)."""
    if best.is_file():
        export(ExportConfig(weights=str(best), format=config.export, cache_dir=config.cache_dir))
    else:
        get_logger().warning("--export: no epoch could be scored, so there is no best.pt to export")


def try_formats(detector: Detector, formats: Sequence[str], imgsz: int) -> None:
    """Exports ``detector`` to a temporary folder and compares all boxes and scores on noise: before training there may
    be no detections to compare. Raises what `export` raises."""
    started = time.monotonic()
    require_packages(formats)
    with tempfile.TemporaryDirectory() as folder:
        config = ExportConfig(weights=str(Path(folder, "untrained.pt")), format=list(formats), check=False)
        detector = copy.deepcopy(detector).to(CPU)
        model = CheckpointModel(detector.fuse(), {"imgsz": imgsz}, Path(config.weights), CPU)
        job = _Job(resolve_options(config, model.detector, imgsz), detector, model, None)
        shape = example_images(model, job.config).shape
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        for name in dict.fromkeys(formats):
            suffix, write = FORMATS[name]
            path = Path(folder, job.stem + suffix)
            write(job.build(name), path, job.metadata)
            box, score = largest_difference(model, open_model(path, device=CPU, trust=True), images)
            if not (box <= FLOAT32.box and score <= FLOAT32.score):
                raise FailedCheck(
                    f"--export {name}: the file does not compute what the model does: boxes differ by {box:.2g} of the "
                    f"image, scores by {score:.2g}"
                )
    seconds = time.monotonic() - started
    get_logger().info("--export: tested before training: %s (%.0f s)", ", ".join(formats), seconds)


def _summary(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    return explanation(error) or f"{type(error).__name__}: {first_line(error)[:300]}"


class Thresholds(NamedTuple):
    """The confidence thresholds of a file; None: not known."""

    output: float | None  # of the output as it is, after NMS if it needs that
    voting: float | None  # after NMS with box voting


@dataclass
class _Job:
    """One checkpoint and the files that it becomes. Graphs that several formats need are built once."""

    config: ExportConfig  # see `resolve_options`
    detector: Detector  # not fused
    model: CheckpointModel
    spec: DatasetSpec | None  # to check and calibrate with; None if it is not needed

    @property
    def stem(self) -> str:
        """The name of the files. A program that reads one layout cannot read the other, so these differ by name."""
        layout = "_end2end" if self.config.layout == "end2end" else ""
        return self.model.path.stem + layout + ("_int8" if self.config.int8 else "")

    @cached_property
    def metadata(self) -> ExportMetadata:
        """What a file says about itself, before its check."""
        model, config, detector, info = self.model, self.config, self.model.detector, self.model.info
        trained, data, ap = info.get("config", {}), info.get("data", {}), info.get("progress", {}).get("best_fitness")
        scored_by_ap = str(trained.get("fitness", "AP")).upper() == "AP"
        if self.spec is not None:
            location = describe_location(self.spec.source, str(self.spec.root), model.path.parent)
        else:
            location = {key: value for key, value in data.items() if key != "fingerprint"}
        return ExportMetadata(
            names=detector.names,
            stride=detector.stride,
            imgsz_hw=tuple(config.imgsz),
            batch=config.batch,
            dynamic=config.dynamic,
            channels=model.pixels.channels,
            bits=model.pixels.bits,
            # Readers of YOLO exports take an end-to-end output for rows of detections.
            end2end=config.layout == "end2end",
            layout=config.layout,
            nms_iou=None if config.layout == "end2end" else config.iou_thres,
            box_voting=config.box_voting,
            validation_iou=detector.head.validation_iou,
            squares=detector.head.squares,
            confidence=self.thresholds.output,
            voting_confidence=self.thresholds.voting if config.layout == "raw" else None,
            data=location,
            description=f"{detector.spec.get('name', 'detector')}, {counted(detector.num_classes, 'class')}",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            author="Lockstep",
            version=f"{VERSION}+{product_version()}",
            license=origin_of(info, model.path).license,
            details={
                "half": config.half,
                "int8": config.int8,
                "classes": trained.get("classes", []),
                "keep_old": trained.get("keep_old", False),
                "tile": info.get("tile", 0),
                "val_images": info.get("val_images", []),
                "data_fingerprint": data.get("fingerprint"),
                "ap": ap if scored_by_ap and isinstance(ap, float) and 0 <= ap <= 1 else None,  # in training
                "checked": "no",
            },
        )

    def split(self, name: str) -> DatasetIndex:
        single_cls = bool(self.model.stored("single_cls"))
        settings = IndexSettings(cache_dir=self.config.cache_dir, single_cls=single_cls, progress=False)
        allowed = self.model.stored("max_bad")
        if type(allowed) in (int, float) and 0 <= allowed <= 1:
            settings = replace(settings, max_bad=float(allowed))  # what the training was allowed to lose
        return load_index(self.spec, name, settings)

    @cached_property
    def calibration_split(self) -> DatasetIndex:
        return spread(self.split("train"), self.config.calibration_images)

    @cached_property
    def val_split(self) -> DatasetIndex:
        return self.split("val")

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.model, spread(self.val_split, self.config.check_images), self.config)

    @cached_property
    def thresholds(self) -> Thresholds:
        """Those of the check if it has all validation images and a canvas of its own, else of training's validation."""
        config, model = self.config, self.model
        if config.check and not config.dynamic and len(self.val_split) <= config.check_images:
            found = self.reference.shown
            output = found.scored_confidence if config.layout == "end2end" else found.plain_confidence
            if output is not None:
                return Thresholds(output, found.threshold)
        output = model.scored_confidence if config.box_voting else model.plain_confidence
        return Thresholds(model.confidence if output is None else output, model.confidence)

    @cached_property
    def float_onnx(self) -> ModelProto:
        return build_onnx(self.module(half=False), self.config)

    @cached_property
    def activation_ranges(self) -> dict[str, tuple[float, float]]:
        return activation_ranges(self.float_onnx, calibration_images(self.calibration_split, self.config))

    def module(self, *, half: bool) -> torch.nn.Module:
        fused, config = self.detector.fuse(one_to_one=not self.config.nms), self.config
        return make_layout(fused, config.layout, half=half, nms_iou=config.iou_thres, box_voting=config.box_voting)

    def build(self, name: str) -> Any:
        """What `FORMATS` writes as the format ``name``."""
        config = self.config
        if name == "torchscript":
            return build_torchscript(self.module(half=config.half), config)
        if name == "pt2":
            return build_pt2(self.module(half=config.half), config)
        to_openvino = name == "openvino"
        if config.int8:
            graph = quantize(self.float_onnx, self.activation_ranges, outputs=not to_openvino)
        elif config.half and not to_openvino:  # OpenVINO rounds float32 weights when it writes the file
            graph = build_onnx(self.module(half=True), config)
        else:
            graph = self.float_onnx
        return build_openvino(graph) if to_openvino else graph

    def run(self, name: str) -> Path:
        """Exports to one format. Raises FailedCheck if the result differs too much from the checkpoint."""
        started, (suffix, write) = time.monotonic(), FORMATS[name]
        built, path = self.build(name), self.model.path.with_name(self.stem + suffix)
        try:
            with temporary_folder(path) as folder:  # a file appears under its name when it is complete and has passed
                candidate = folder / path.name
                write(built, candidate, self.metadata)
                if not self.config.check:
                    replace_path(candidate, path)
                    self._log(path, "not checked (--no-check)", built)
                    return path
                allowed = INT8 if self.config.int8 else FLOAT16 if self.config.half else FLOAT32
                exported = open_model(candidate, device=CPU, trust=True)
                parity = self.reference.compare(exported, allowed, threshold=self.thresholds.output)
                if problems := parity.violations(allowed):
                    kept = path.with_name(f"{path.name}.failed")
                    replace_path(candidate, kept)
                    raise FailedCheck(
                        f"{kept}: differs too much from the checkpoint: {'; '.join(problems)} (worst image: "
                        f"{parity.worst_image})"
                    )
                found = {key: getattr(parity, key) for key in ("images", "ap", "ap_checkpoint", "f1", "threshold")}
                details = self.metadata.details | {"checked": "yes", "check": found}
                write(built, candidate, replace(self.metadata, details=details))
                replace_path(candidate, path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({(error.strerror or str(error)).lower()})") from None
        self._log(path, f"{time.monotonic() - started:.0f} s; {parity.line}", built)
        return path

    def _log(self, path: Path, text: str, built: Any) -> None:
        """A line about a file that is complete, and what an ONNX file needs."""
        get_logger().info("%s: %.1f MB, %s", path, file_bytes(path) / 1e6, text)
        if path.suffix == ".onnx":
            get_logger().info("%s: %s", path, required_runtime(built))


# By name: the suffix, and what writes a file; once more, with other metadata, when the file has passed its check.
FORMATS: dict[str, tuple[str, Callable[[Any, Path, ExportMetadata], None]]] = {
    "onnx": (".onnx", write_onnx),
    "openvino": (OPENVINO_FOLDER, write_openvino),
    "torchscript": (".torchscript", write_torch),
    "pt2": (".pt2", write_torch),
}
