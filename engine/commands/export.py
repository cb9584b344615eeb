"""Implements export.py, which exports a checkpoint to other runtimes and compares each file with it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from data.dataset.spec import DatasetSpec, DataSource
from engine.commands.export_record import ExportRecord
from engine.export.export_data import open_export_data
from engine.export.exporter import CPU, Exporter
from engine.export.options import require_packages, resolve_options
from engine.inference.model import CheckpointModel
from engine.inference.model_data import open_model_data
from engine.inference.open_model import is_exported
from engine.train.folder import lock_folder
from models.weights.download import fetch_weights
from models.weights.load import load_detector
from utils.config.settings import ExportConfig, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import ExplainedError, FailedCheck, UserError, first_line
from utils.logger import configure_logging, get_logger
from utils.machine.limits import explain_limit
from utils.machine.packages import require_installed

# Called with the format and its finished file, before that is renamed into place.
BeforePublish = Callable[[str, Path], None]


def export(config: ExportConfig, before_publish: BeforePublish = lambda name, path: None) -> list[Path]:
    """Exports ``config.weights`` in each format; returns the files, which are next to the weights.

    A format that fails does not prevent the others from being written; a UserError at the end reports it. A file that
    differs too much from the checkpoint is kept as NAME.failed, and the error is a FailedCheck.
    """
    configure_logging(True)
    require_packages(config.format)
    if config.int8:
        require_installed(["onnxruntime"], "--int8", "leave it out")
    return _export_each(open_exporter(config), list(dict.fromkeys(config.format)), before_publish)


def export_best(folder: Path, config: TrainConfig, *, failure: UserError | None = None) -> None:
    """Exports the best checkpoint of the run in ``folder`` after its last epoch (``--export``). Files that an earlier
    start of the run has exported from the same checkpoint are kept, as are files that the user has put there.

    The folder is locked while files are exported. Raises UserError if another process holds it.

    ``failure``: error of the training, which the caller raises afterwards. It is logged before the first export, which
    may take long, or be killed.
    """
    best = folder / "best.pt"
    if not best.exists():
        get_logger().warning("--export: no best.pt to export: no epoch has a score, or it was moved")
        return
    record = ExportRecord(best)
    missing = record.missing(config.export)
    if not missing:
        return  # without a lock: the folder of a run that has ended may be read-only
    if failure is not None:
        get_logger().warning("%s", failure)
    with ExitStack() as stack:
        lock_folder(folder, stack)
        options = ExportConfig(weights=str(best), format=missing, cache_dir=config.cache_dir)
        try:
            export(options, before_publish=record.add)
        except UserError as error:  # may name flags, which train.py does not have
            command = shlex.join(["--weights", str(best), "--format", *missing])
            raise UserError(f"{error}; to export with other flags: python export.py {command}") from None


def open_exporter(config: ExportConfig) -> Exporter:
    """Opens the checkpoint and the data, so that their errors are reported once and not for each format."""
    if is_exported(config.weights):
        raise UserError(f"{config.weights}: is exported already; name a checkpoint")
    ctx = DistributedContext.single(CPU)
    weights = fetch_weights(config.weights, ctx=ctx, offline=config.offline)
    detector, info = load_detector(weights)
    if config.nms and not detector.head.is_dual:
        raise UserError(f"--nms: {weights} has one branch; leave it out, or write --layout end2end for NMS in the file")
    fused = detector.fuse(one_to_one=not config.nms)
    options = resolve_options(config, fused, info["imgsz"])
    model = CheckpointModel(fused, info, weights, CPU)
    data = None
    if config.check or config.int8:
        data = open_export_data(model, _open_spec(model, config, ctx), config, options)
    return Exporter(detector=detector, model=model, options=options, data=data)


def _open_spec(model: CheckpointModel, config: ExportConfig, ctx: DistributedContext) -> DatasetSpec:
    instead = "" if config.int8 else ", or export without a check with --no-check"
    source = DataSource(config.data, cache_dir=config.cache_dir)
    return open_model_data(model, source, ctx, single_cls=model.has_merged_classes, instead=instead)


def _export_each(exporter: Exporter, formats: list[str], before_publish: BeforePublish) -> list[Path]:
    """Writes each format. Raises the error of a single format, or one that counts the failed formats."""
    files: list[Path] = []
    failed: dict[str, Exception] = {}
    for name in formats:
        try:
            files.append(exporter.export(name, partial(before_publish, name)))
        except Exception as error:
            if len(formats) == 1:
                raise
            failed[name] = error
            get_logger().warning("%s: %s", name, _summary(error))
    if failed:
        first, reason = next(iter(failed.items()))
        only_checks_failed = all(isinstance(error, FailedCheck) for error in failed.values())
        error_type = FailedCheck if only_checks_failed else UserError
        raise error_type(f"{len(failed)} of {len(formats)} formats failed (first: {first}: {_summary(reason)})")
    return files


def _summary(error: Exception) -> str:
    if isinstance(error, ExplainedError):
        return str(error)
    return explain_limit(error) or f"{type(error).__name__}: {first_line(error)[:300]}"
