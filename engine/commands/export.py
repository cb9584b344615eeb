"""Implements export.py, which writes a checkpoint as files of other runtimes, each checked against it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from data.source.dataset_spec import DatasetSpec, DataSource
from engine.checkpoint.newest_run import best_of_newest_run
from engine.export.export_data import open_export_data
from engine.export.exporter import CPU, Exporter
from engine.export.options import require_packages, resolve_options
from engine.inference.model import CheckpointModel
from engine.inference.model_data import open_model_data
from engine.inference.open_model import is_exported
from models.weights.download import fetch_weights
from models.weights.load import load_detector
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import ExportConfig, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import ExplainedError, FailedCheck, UserError, first_line
from utils.files.checksum import sha256_of
from utils.files.safe_io import read_text, write_whole
from utils.logger import configure_logging, get_logger
from utils.machine.packages import require_installed
from utils.process.limits import explain_limit

EXPORT_RECORD = ".exports"  # in the folder of a run
MAX_RECORD_BYTES = 1 << 16


def export(config: ExportConfig, on_written: Callable[[str], None] = lambda name: None) -> list[Path]:
    """Exports ``config.weights`` in each format; returns the files. They lie next to the weights. ``on_written`` is
    called with each format whose file is complete.

    A format that fails does not keep others from being written; a UserError at the end names it. A file that differs
    too much from the checkpoint is kept as NAME.failed, and the error is a FailedCheck.
    """
    configure_logging(True)
    require_packages(config.format)
    if config.int8:
        require_installed(["onnxruntime"], "--int8", "leave it out")
    return _export_each(_open_exporter(config), list(dict.fromkeys(config.format)), on_written)


def export_best(folder: Path, config: TrainConfig) -> None:
    """Exports the best checkpoint of the run in ``folder`` after its last epoch (``--export``). Files that an earlier
    start of the run has exported from the same checkpoint stay."""
    best = best_of_newest_run(folder)
    if best is None:
        get_logger().warning("--export: no epoch could be scored, so there is no best.pt to export")
        return
    record = _ExportRecord(best)
    missing = [name for name in config.export if not record.has(name)]
    if missing:
        options = ExportConfig(weights=str(best), format=missing, cache_dir=config.cache_dir)
        export(options, on_written=record.add)


class _ExportRecord:
    """The formats to which a run has exported the checkpoint ``best``: a file in the run's folder, with the checksum of
    the checkpoint, which also tells in a copy of the folder whether the exported files are its own."""

    def __init__(self, best: Path) -> None:
        self._best = best
        self._path = best.with_name(EXPORT_RECORD)
        self._checksum = sha256_of(best)
        self._formats = self._read()

    def has(self, name: str) -> bool:
        file = self._best.with_name(self._best.stem + EXPORT_FORMATS[name].suffix)  # `file_path` without options
        return name in self._formats and file.exists()

    def add(self, name: str) -> None:
        self._formats.append(name)
        write_whole(self._path, json.dumps({"weights_sha256": self._checksum, "formats": self._formats}))

    def _read(self) -> list[str]:
        """Returns the formats in the record; none if it is of another checkpoint, missing or damaged."""
        try:
            content = json.loads(read_text(self._path, MAX_RECORD_BYTES))
        except (UserError, ValueError, RecursionError):
            return []
        if not isinstance(content, dict) or content.get("weights_sha256") != self._checksum:
            return []
        formats = content.get("formats")
        return [name for name in formats if isinstance(name, str)] if isinstance(formats, list) else []


def _open_exporter(config: ExportConfig) -> Exporter:
    """Opens the checkpoint and the data, so that their errors are reported once and not for each format."""
    if is_exported(config.weights):
        raise UserError(f"{config.weights}: is exported already; name a checkpoint")
    ctx = DistributedContext.single(CPU)
    weights = fetch_weights(config.weights, ctx=ctx, offline=config.offline)
    detector, info = load_detector(weights)
    if config.nms and not detector.head.is_dual:
        raise UserError(f"--nms: {weights} has one branch; leave it out")
    fused = detector.fuse(one_to_one=not config.nms)
    options = resolve_options(config, fused, info["imgsz"])
    model = CheckpointModel(fused, info, weights, CPU)
    data = None
    if config.check or config.int8:
        data = open_export_data(model, _open_spec(model, config, ctx), config)
    return Exporter(detector=detector, model=model, options=options, data=data)


def _open_spec(model: CheckpointModel, config: ExportConfig, ctx: DistributedContext) -> DatasetSpec:
    instead = "" if config.int8 else ", or export without a check with --no-check"
    source = DataSource(config.data, cache_dir=config.cache_dir)
    return open_model_data(model, source, ctx, single_cls=model.has_merged_classes, instead=instead)


def _export_each(exporter: Exporter, formats: list[str], on_written: Callable[[str], None]) -> list[Path]:
    """Writes each format. Raises the error of a single format, or one that counts those which failed."""
    files: list[Path] = []
    failed: dict[str, Exception] = {}
    for name in formats:
        try:
            files.append(exporter.export(name))
        except Exception as error:
            if len(formats) == 1:
                raise
            failed[name] = error
            get_logger().warning("%s: %s", name, _summary(error))
        else:
            on_written(name)
    if failed:
        first, reason = next(iter(failed.items()))
        only_checks_failed = all(isinstance(each, FailedCheck) for each in failed.values())
        error_type = FailedCheck if only_checks_failed else UserError
        raise error_type(f"{len(failed)} of {len(formats)} formats failed (first: {first}: {_summary(reason)})")
    return files


def _summary(error: Exception) -> str:
    if isinstance(error, ExplainedError):
        return str(error)
    return explain_limit(error) or f"{type(error).__name__}: {first_line(error)[:300]}"
