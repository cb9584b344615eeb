"""The work of export.py: a checkpoint to files of other runtimes, each checked against the checkpoint."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from data.index.index import DatasetIndex
from data.index.load import load_index
from data.spec.dataset_spec import DatasetSpec, DataSource
from engine.export.formats.int8 import activation_ranges, quantize
from engine.export.formats.onnx_file import build_onnx, write_onnx
from engine.export.formats.openvino_folder import build_openvino, write_openvino
from engine.export.formats.torch_files import build_pt2, build_torchscript, write_pt2, write_torchscript
from engine.export.layouts import make_layout
from engine.export.metadata import checked, export_metadata, labels_text, model_card
from engine.export.options import ExportOptions, require_packages, resolve_options
from engine.export.parity import Parity, Reference, calibration_images, check_set, largest_difference, tolerance
from engine.inference.data_set import open_for_models
from engine.inference.model import CheckpointModel
from engine.inference.runtimes.metadata import ExportMetadata
from engine.inference.runtimes.open import OPENVINO_FOLDER, is_exported, open_model
from models.detector import Detector
from models.weights.download import fetch_weights, origin_of
from models.weights.load import load_detector
from utils.config.settings import ExportConfig, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import FailedCheck, UserError, first_line
from utils.files.folders import Origin, describe_location, file_bytes, replace_path, temporary_folder
from utils.files.safe_io import write_whole
from utils.logger import configure_logging, get_logger
from utils.machine.limits import explanation, require_package

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
        require_package("onnxruntime", "--int8", "leave it out")
    if is_exported(config.weights):
        raise UserError(f"{config.weights}: is exported already; name a checkpoint")
    ctx = DistributedContext.single(CPU)
    weights = fetch_weights(config.weights, ctx=ctx, offline=config.offline)
    detector, info = load_detector(weights)
    _check_writable(weights)
    if config.nms and not detector.head.is_dual:
        raise UserError(f"--nms: {weights} has one branch; leave it out")
    fused = detector.fuse(one_to_one=not config.nms)
    options = resolve_options(config, fused, info["imgsz"])
    model = CheckpointModel(fused, info, weights, CPU)
    spec = None
    if config.check or config.int8:
        instead = "" if config.int8 else ", or export without a check with --no-check"
        source = DataSource(config.data, cache_dir=config.cache_dir)
        spec = open_for_models([model], source, ctx, single_cls=is_single_cls(model), instead=instead)
    job = _Job(config, options, detector, model, spec)
    job.read_data()
    done: dict[Path, Parity | None] = {}
    failed: dict[str, Exception] = {}
    formats = list(dict.fromkeys(config.format))
    for name in formats:
        try:
            path, parity = job.run(name)
            done[path] = parity
        except Exception as error:
            if len(formats) == 1:
                raise
            failed[name] = error
            get_logger().warning("%s: %s", name, _summary(error))
    if done:
        job.write_texts(done)
    if failed:
        name, error = next(iter(failed.items()))
        kind = FailedCheck if all(isinstance(e, FailedCheck) for e in failed.values()) else UserError
        raise kind(f"{len(failed)} of {len(formats)} formats failed (first: {name}: {_summary(error)})")
    return list(done)


def _check_writable(weights: Path) -> None:
    try:
        with temporary_folder(weights):
            pass
    except OSError as error:
        raise UserError(
            f"{weights.parent}: exported files are written next to the weights, but this folder cannot be written to "
            f"({(error.strerror or str(error)).lower()}); copy the weights to another"
        ) from None


def export_best(best: Path, config: TrainConfig) -> None:
    """The exports that ``--export`` asks for after the last epoch, next to ``best``, the best checkpoint of the run."""
    if best.is_file():
        export(ExportConfig(weights=str(best), format=config.export, cache_dir=config.cache_dir))
    else:
        get_logger().warning("--export: no epoch could be scored, so there is no best.pt to export")


def try_formats(detector: Detector, formats: Sequence[str], imgsz: int) -> None:
    """Exports ``detector``, which need not be trained, to a temporary folder, and runs each file on noise.

    Raises what `export` raises. Its check compares detections, of which there may be none before training: here all
    boxes and scores are compared.
    """
    started = time.monotonic()
    require_packages(formats)
    with tempfile.TemporaryDirectory() as folder:
        config = ExportConfig(weights=str(Path(folder, "untrained.pt")), format=list(formats), check=False)
        detector = copy.deepcopy(detector).to(CPU)
        model = CheckpointModel(detector.fuse(), {"imgsz": imgsz}, Path(config.weights), CPU)
        job = _Job(config, resolve_options(config, model.detector, imgsz), detector, model, None)
        images = torch.rand(job.options.input_shape, generator=torch.Generator().manual_seed(0))
        for name in dict.fromkeys(formats):
            form = FORMATS[name]
            path = Path(folder, job.stem + form.suffix)
            form.write(form.build(job), path, job.metadata)
            box, score = largest_difference(model, open_model(path, device=CPU, trust=True), images)
            allowed = tolerance(half=False, int8=False)
            if not (box <= allowed.box and score <= allowed.score):
                raise FailedCheck(
                    f"--export {name}: the file does not compute what the model does: boxes differ by {box:.2g} of the "
                    f"image, scores by {score:.2g}"
                )
    seconds = time.monotonic() - started
    get_logger().info("--export: tested before training: %s (%.0f s)", ", ".join(formats), seconds)


def _summary(error: Exception) -> str:
    """Why a format failed, in one line."""
    if isinstance(error, UserError):
        return str(error)
    return explanation(error) or f"{type(error).__name__}: {first_line(error)[:300]}"


def is_single_cls(model: CheckpointModel) -> bool:
    """Whether the checkpoint was trained with all classes of its data set as one."""
    return bool(model.info.get("config", {}).get("single_cls"))


@dataclass
class _Job:
    """One checkpoint and the files that it becomes. Graphs that several formats need are built once."""

    config: ExportConfig
    options: ExportOptions
    detector: Detector  # not fused
    model: CheckpointModel
    spec: DatasetSpec | None  # to check and calibrate with; None if it is not needed

    @property
    def stem(self) -> str:
        return self.model.path.stem + ("_int8" if self.options.int8 else "")

    @cached_property
    def origin(self) -> Origin:
        return origin_of(self.model.info, self.model.path)

    @property
    def data(self) -> dict[str, str]:
        """Where the data set is, as checkpoints store it."""
        if self.spec is not None:
            return describe_location(self.spec.source, str(self.spec.root), self.model.path.parent)
        return {key: value for key, value in self.model.info.get("data", {}).items() if key != "fingerprint"}

    @cached_property
    def metadata(self) -> ExportMetadata:
        model = self.model
        return export_metadata(model, self.options, data=self.data, license=self.origin.license)

    def split(self, name: str) -> DatasetIndex:
        single_cls = is_single_cls(self.model)
        return load_index(self.spec, name, cache_dir=self.config.cache_dir, single_cls=single_cls, progress=False)

    @cached_property
    def calibration_split(self) -> DatasetIndex:
        return self.split("train")

    def read_data(self) -> None:
        """Reads what all formats need of the data set, so that its errors are reported once."""
        if self.config.int8:
            count = min(len(self.calibration_split), self.config.calibration_images)
            if count < self.options.batch:
                raise UserError(
                    f"--batch {self.options.batch}: is more than there are images to calibrate --int8 with ({count})"
                )
        if self.config.check:
            _ = self.reference

    @cached_property
    def reference(self) -> Reference:
        images = check_set(self.split("val"), self.config.check_images, self.options, self.model.stride)
        return Reference(self.model, images, self.options)

    def module(self, *, half: bool | None = None) -> torch.nn.Module:
        """``half``: other than ``--half`` says."""
        fused, options = self.detector.fuse(one_to_one=not self.config.nms), self.options
        half = options.half if half is None else half
        return make_layout(fused, options.layout, half=half, nms_iou=options.nms_iou, box_voting=options.box_voting)

    @cached_property
    def float_onnx(self) -> ModelProto:
        return build_onnx(self.module(half=False), self.options, self.model.stride)

    @cached_property
    def activation_ranges(self) -> dict[str, tuple[float, float]]:
        images = calibration_images(self.calibration_split, self.config.calibration_images, self.options)
        return activation_ranges(self.float_onnx, images)

    def graph(self, *, outputs: bool) -> ModelProto:
        """In float32 or with 8-bit convolutions; ``outputs``: see `quantize`."""
        if not self.options.int8:
            return self.float_onnx
        return quantize(self.float_onnx, self.activation_ranges, outputs=outputs)

    def run(self, name: str) -> tuple[Path, Parity | None]:
        """Exports to one format. Raises FailedCheck if the result differs too much from the checkpoint."""
        started, form = time.monotonic(), FORMATS[name]
        built, path = form.build(self), self.model.path.with_name(self.stem + form.suffix)
        with temporary_folder(path) as folder:  # a file appears under its name when it is complete and has passed
            candidate = folder / path.name
            with _errors_name(path):
                form.write(built, candidate, self.metadata)
            if not self.config.check:
                replace_path(candidate, path)
                get_logger().info("%s: %.1f MB, not checked (--no-check)", path, file_bytes(path) / 1e6)
                return path, None
            allowed = tolerance(half=self.options.half, int8=self.options.int8)
            parity = self.reference.compare(open_model(candidate, device=CPU, trust=True), allowed)
            if problems := parity.violations(allowed):
                kept = path.with_name(f"{path.name}.failed")
                replace_path(candidate, kept)
                raise FailedCheck(
                    f"{kept}: differs too much from the checkpoint: {'; '.join(problems)} (worst image: "
                    f"{parity.worst_image})"
                )
            with _errors_name(path):
                form.write(built, candidate, replace(self.metadata, details=checked(self.metadata, parity)))
            replace_path(candidate, path)
        get_logger().info(
            "%s: %.1f MB, %.0f s; %s", path, file_bytes(path) / 1e6, time.monotonic() - started, parity.line
        )
        return path, parity

    def write_texts(self, done: dict[Path, Parity | None]) -> None:
        """The list of classes and the model card."""
        model, sibling = self.model, self.model.path.with_name
        labels, card_path = sibling(f"{self.stem}.labels.txt"), sibling(f"{self.stem}.md")
        with _errors_name(labels):
            write_whole(labels, labels_text(model.names))
        results = {path.name: parity for path, parity in done.items()}
        card = model_card(model.path, model.info, self.metadata, results, self.origin)
        with _errors_name(card_path):
            write_whole(card_path, card)


class Format(NamedTuple):
    """``build`` makes what ``write`` writes, again with other metadata when it has passed the check."""

    suffix: str
    build: Callable[[_Job], Any]
    write: Callable[[Any, Path, ExportMetadata], None]


def _onnx_graph(job: _Job) -> ModelProto:
    if job.options.half:
        return build_onnx(job.module(), job.options, job.model.stride)
    return job.graph(outputs=True)


FORMATS = {
    "onnx": Format(".onnx", _onnx_graph, write_onnx),
    "openvino": Format(OPENVINO_FOLDER, lambda job: build_openvino(job.graph(outputs=False)), write_openvino),
    "torchscript": Format(".torchscript", lambda job: build_torchscript(job.module(), job.options), write_torchscript),
    "pt2": Format(".pt2", lambda job: build_pt2(job.module(), job.options, job.model.stride), write_pt2),
}


@contextlib.contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Turns errors of a block that writes ``path`` into UserErrors that name it, not its temporary file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({(error.strerror or str(error)).lower()})") from None
