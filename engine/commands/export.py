"""Implements export.py, which exports a checkpoint to other runtimes and compares each file with it."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from data.index import IndexSettings
from data.load import load_index
from data.samples.readers import SampleReader
from data.spec import DatasetSpec, DataSource
from engine.export.formats import describe_exported, format_module, require_packages
from engine.export.graphs import ModelGraphs, ResolvedExport, resolve_options
from engine.export.images import calibration_batches, open_samples
from engine.export.metadata import ExportMetadata
from engine.export.parity import CPU, FLOAT16, FLOAT32, INT8, Reference
from engine.inference.model import CheckpointModel, open_model
from engine.inference.model_data import class_columns, open_model_data
from engine.run.folder import lock_folder
from models.postprocess.selection import DEFAULT_CONFIDENCE
from models.weights.download import fetch_weights
from models.weights.load import load_detector
from models.weights.origin import origin_of
from utils.config.commands import COMMANDS
from utils.config.export_formats import EXPORT_FORMATS, formats_with
from utils.config.settings import ExportConfig, TrainConfig
from utils.distributed.agreement import product_version
from utils.distributed.context import DistributedContext
from utils.errors import ExplainedError, FailedCheck, UserError, first_line, os_reason
from utils.files.safe_io import sha256_of
from utils.files.temporary_folder import replace_path, temporary_folder
from utils.logger import configure_logging, get_logger
from utils.machine.limits import explain_limit
from utils.program import VERSION
from utils.strings import counted

CHECK_IMAGES = 64  # validation images on which a file is compared with the checkpoint
CALIBRATION_IMAGES = 300  # training images for --int8


def export(config: ExportConfig, *, by_training: bool = False) -> list[Path]:
    """Exports ``config.weights`` in each format; returns the files, which are next to the weights.

    A format that fails does not prevent the others from being written; a UserError at the end reports it. A file that
    differs too much from the checkpoint is kept as NAME.failed, and the error is a FailedCheck.

    ``by_training``: whether ``train.py --export`` writes the files; it is recorded in their metadata.
    """
    configure_logging(True)
    require_packages(config.format, int8=config.int8)
    weights = fetch_weights(config.weights, ctx=DistributedContext.single(CPU), offline=config.offline)
    detector, info = load_detector(weights)
    if config.nms and not detector.head.is_dual:
        raise UserError(f"--nms: {weights} has one branch; leave it out, or write --layout end2end for NMS in the file")
    fused = detector.fuse(one_to_one=not config.nms)
    options = resolve_options(config, fused, info["imgsz"])
    model = CheckpointModel(fused, info, weights, CPU)
    model.nms_iou = options.nms_iou
    graphs = ModelGraphs(detector, options)
    reference: Reference | None = None
    try:
        spec = _open_data(config, model) if config.check or config.int8 else None
        if spec is not None and config.int8:
            reader = _open_images(config, model, spec, "train", count=CALIBRATION_IMAGES, options=options)
            found = len(reader.sample_index)
            if found < config.batch:
                raise UserError(f"--batch {config.batch}: is more than there are images to calibrate ({found})")
            graphs.calibration = partial(calibration_batches, reader, replace(options, dynamic=False), model.stride)
        if spec is not None and config.check:
            reader = _open_images(config, model, spec, "val", count=CHECK_IMAGES, options=options)
            reference = Reference(model, reader, options)
    except UserError as error:
        instead = "" if config.int8 else "; --no-check exports without a check"
        raise UserError(f"export stopped: {error}{instead}") from None
    metadata = _describe_file(model, options, reference, by_training=by_training)

    files: list[Path] = []
    failures: dict[str, Exception] = {}
    formats = list(dict.fromkeys(config.format))
    for name in formats:
        try:
            files.append(_export_format(name, file_path(weights, config, name), graphs, metadata, reference))
        except Exception as error:
            if len(formats) == 1:
                raise
            failures[name] = error
            get_logger().warning("%s: %s", name, _summary(error))
    has_rectangles = not (options.dynamic or model.squares or model.tile)  # the checkpoint, not the files
    if files and has_rectangles and set(formats) & set(formats_with("--dynamic")):
        note = "files of a fixed size take one canvas, while detect.py pads images to rectangles for the checkpoint"
        get_logger().info("%s; %s --dynamic writes files that take both", note, COMMANDS["export"].typed)
    for path in files:
        get_logger().info("next: %s", _next_command(path, config.data, has_data=bool(model.info.get("data"))))
    if files:
        for line in _use_elsewhere(metadata, options.imgsz_hw):
            get_logger().info("%s", line)
    if failures:
        first, reason = next(iter(failures.items()))
        only_checks_failed = all(isinstance(error, FailedCheck) for error in failures.values())
        error_type = FailedCheck if only_checks_failed else UserError
        raise error_type(f"{len(failures)} of {len(formats)} formats failed (first: {first}: {_summary(reason)})")
    return files


def export_best(folder: Path, config: TrainConfig) -> None:
    """Exports the best checkpoint of the run in ``folder`` after its last epoch (``--export``), in the formats of which
    there is no file yet, or one that ``--export`` has written from an earlier best.pt. Other files, also those that
    cannot be read, are kept, each with a warning.

    The folder is locked while files are exported. Raises UserError if another process holds it.
    """
    best = folder / "best.pt"
    if not best.exists():
        get_logger().warning("--export: no best.pt to export: no epoch has a score, or it was moved")
        return
    settings = ExportConfig(weights=str(best), cache_dir=config.cache_dir)
    typed = f"{COMMANDS['export'].typed} --weights {shlex.quote(str(best))} --format"
    missing: list[str] = []
    for name in config.export:
        path = file_path(best, settings, name)
        if not os.path.lexists(path):
            missing.append(name)
            continue
        details: dict[str, Any] = {}
        with contextlib.suppress(UserError):  # a damaged file, or one of another program
            details = describe_exported(path).details
        if details.get("by_training") is not True:
            reason = f"it does not say that --export wrote it; to replace it: {typed} {name}"
            get_logger().warning("--export: %s is kept: %s", path, reason)
        elif details.get("weights_sha256") != sha256_of(best):
            missing.append(name)
    if not missing:
        return  # without a lock: the folder of a run that has ended may be read-only
    with contextlib.ExitStack() as stack:
        lock_folder(folder, stack)
        try:
            export(replace(settings, format=missing), by_training=True)
        except UserError as error:  # may name flags, which train.py does not have
            raise UserError(f"{error}; to export with other flags: {typed} {' '.join(missing)}") from None


def _open_data(config: ExportConfig, model: CheckpointModel) -> DatasetSpec:
    """Opens the data of the check and the calibration. Raises UserError if it is not known, or has other classes."""
    source = DataSource(config.data, cache_dir=config.cache_dir)
    ctx = DistributedContext.single(CPU)
    spec = open_model_data(model, source, ctx, single_cls=model.has_merged_classes)
    if class_columns(model, spec) not in (None, list(range(len(model.names)))):
        raise UserError(
            f"{spec.source}: has the classes of {model.path} in another order; --data names that of its training"
        )
    return spec


def _open_images(
    config: ExportConfig, model: CheckpointModel, spec: DatasetSpec, split: str, *, count: int, options: ResolvedExport
) -> SampleReader:
    """Opens about ``count`` images of a split, or tiles if the model was trained on tiles."""
    settings = IndexSettings(cache_dir=config.cache_dir, single_cls=model.has_merged_classes, progress=False)
    allowed = model.stored("max_bad")  # the fraction that the training was allowed to lose
    is_fraction = type(allowed) in (int, float) and 0 <= allowed <= 1
    index = load_index(spec, split, settings, max_bad=allowed if is_fraction else TrainConfig.max_bad)
    return open_samples(index, count=count, imgsz=max(options.imgsz_hw), tile=model.tile)


def _describe_file(
    model: CheckpointModel, options: ResolvedExport, reference: Reference | None, *, by_training: bool
) -> ExportMetadata:
    """Returns the metadata of the files of an export.

    Args:
        reference: the checkpoint's scores on the canvas of the files; None: they are not checked.
        by_training: whether ``train.py --export`` writes the files, and may replace them.
    """
    detector = model.detector
    confidence = _threshold(model, options, reference)
    if confidence is None and (model.is_unscored_branch or model.confidence is not None):
        known = "the one-to-one branch" if model.is_unscored_branch else "detections with box voting"
        get_logger().info("the files state no confidence threshold: training's is that of %s", known)
    return ExportMetadata(
        names=detector.names,
        stride=detector.stride,
        imgsz_hw=options.imgsz_hw,
        batch=options.batch,
        dynamic=options.dynamic,
        channels=model.pixels.channels,
        bits=model.pixels.bits,
        end2end=options.end2end,  # readers of YOLO exports take such an output for rows of detections
        nms_iou=options.nms_iou,
        validation_iou=detector.head.validation_iou,
        squares=detector.head.square_letterbox,
        confidence=confidence,
        description=f"{detector.spec.get('name', 'detector')}, {counted(detector.num_classes, 'class')}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        author="Lockstep",
        version=f"{VERSION}+{product_version()}",
        license=origin_of(model.info, model.path).license,
        details={  # val.py and detect.py read the entries about the training, `InferenceModel.stored`
            "half": options.half,
            "int8": options.int8,
            "used_classes": model.trained_classes,
            "keep_old": model.has_kept_classes,
            "single_cls": model.has_merged_classes,
            "tile": model.tile,
            "unchecked": reference is None,
            "by_training": by_training,
            "weights_sha256": sha256_of(model.path),
        },
    )


def _threshold(model: CheckpointModel, options: ResolvedExport, reference: Reference | None) -> float | None:
    """Returns the confidence threshold that F1 chooses for what detect.py finds with the files; None: unknown.

    The training chose one on its own canvases, with box voting. A file of fixed size usually has others (most
    checkpoints are validated on rectangles), and a graph with NMS does not vote: for these the check chooses a
    threshold, unless none of its detections is correct. It also does if the training has none. With tiles, the
    training's is kept for a file without NMS: it joins tiles to images, which the check does not.
    """
    has_nms = options.end2end and options.nms_iou is not None
    trained = None if has_nms else model.confidence
    is_trained_size = options.imgsz_hw == (model.imgsz, model.imgsz)
    has_trained_canvas = options.dynamic or model.tile > 0 or (model.squares and is_trained_size)
    checked = None if reference is None else reference.result.threshold
    if checked is None or (trained is not None and has_trained_canvas):
        return trained
    return checked


def _export_format(
    name: str, path: Path, graphs: ModelGraphs, metadata: ExportMetadata, reference: Reference | None
) -> Path:
    """Writes the format ``name``. The file gets its name ``path`` when it has passed its check."""
    started = time.monotonic()
    options = graphs.options
    failed = path.with_name(f"{path.name}.failed")
    with contextlib.ExitStack() as stack:
        with _write_errors_of(path):
            candidate = stack.enter_context(temporary_folder(path)) / path.name
            requirements = format_module(name).write(graphs, candidate, metadata)
        outcome = "not checked (--no-check)"
        if reference is not None:
            tolerance = FLOAT32
            if options.half:
                tolerance = FLOAT16
            elif options.int8:
                tolerance = INT8
            parity = reference.compare(open_model(candidate, device=CPU, trust=True), tolerance)
            if parity.problems:
                with _write_errors_of(path):
                    replace_path(candidate, failed)
                earlier = f"; {path} is still the file of an earlier export" if os.path.lexists(path) else ""
                raise FailedCheck(
                    f"{failed}: differs too much from the checkpoint on {reference.conditions}: "
                    f"{'; '.join(parity.problems)}{earlier}; --no-check accepts it all the same"
                )
            outcome = f"{time.monotonic() - started:.0f} s; {reference.conditions}: {parity.summary}"
        with _write_errors_of(path):
            if os.path.lexists(path):
                outcome += "; replaces an earlier export"
            replace_path(candidate, path)
            if os.path.lexists(failed):  # of an earlier export: removed with the temporary folder
                os.replace(failed, candidate.with_name(failed.name))
    get_logger().info("%s: %.1f MB, %s", path, file_bytes(path) / 1e6, outcome)
    if requirements:
        get_logger().info("%s: %s", path, requirements)
    return path


def file_path(weights: Path, config: ExportConfig, name: str) -> Path:
    """Returns the path of a file of the format ``name``.

    It differs by branch and by layout, because a program that reads one cannot read the other, and by precision, so
    that files of several precisions can be compared.
    """
    is_end2end = config.layout == "end2end"
    flags = {"nms": config.nms, "end2end": is_end2end, "half": config.half, "int8": config.int8}
    words = [weights.stem, *(flag for flag, is_set in flags.items() if is_set)]
    return weights.with_name("_".join(words) + EXPORT_FORMATS[name].suffix)


def file_bytes(path: Path) -> int:
    """Returns the size of an exported file, or of all files in an exported folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)))


@contextlib.contextmanager
def _write_errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({os_reason(error)})") from None


def _summary(error: Exception) -> str:
    if isinstance(error, ExplainedError):
        return str(error)
    return explain_limit(error) or f"{type(error).__name__}: {first_line(error)[:300]}"


def _use_elsewhere(metadata: ExportMetadata, imgsz_hw: tuple[int, int]) -> tuple[str, str]:
    """Returns two lines about using the files in other programs."""
    height, width = imgsz_hw
    colors = "RGB" if metadata.channels == 3 else f"{metadata.channels} channels"
    threshold = None if metadata.needs_nms else metadata.confidence  # that of raw files is of boxes after box voting
    output = "rows of x1, y1, x2, y2, score, class" if metadata.end2end else "cx, cy, w, h and a score for each class"
    nms = ", and apply NMS" if metadata.needs_nms else ""
    return (
        f"without Lockstep: feed {colors} from 0 to 1, letterboxed to {height}x{width} with gray 114 of 255; read "
        f"{output}, keep scores above {threshold or DEFAULT_CONFIDENCE:.3g}{nms}",
        'docs/export.md, "Without Lockstep", has the program for ONNX Runtime, NumPy and OpenCV',
    )


def _next_command(path: Path, data: str, *, has_data: bool) -> str:
    """Returns the command that uses a file: val.py, if ``data`` or the checkpoint (``has_data``) names a data set."""
    words = ["--weights", str(path)]
    if data:
        words += ["--data", data]
    elif not has_data:
        words += ["--source", "IMAGES"]
    name = next(name for name, entry in EXPORT_FORMATS.items() if path.name.endswith(entry.suffix))
    if EXPORT_FORMATS[name].runs_code:
        words.append("--trust")
    return f"{COMMANDS['val' if data or has_data else 'detect'].typed} {shlex.join(words)}"
