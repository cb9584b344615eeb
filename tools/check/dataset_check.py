"""Checks a data set, with a model if there is one, and writes the page. Needs torch, unlike __main__.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.source.dataset_spec import DatasetSpec, DataSource
from data.source.open import open_data
from engine.commands.val import canvases_of, check_size
from engine.evaluation.issues import CheckedSplit, Issue
from engine.evaluation.label_errors import trust_lines
from engine.inference.model import InferenceModel
from engine.inference.model_data import check_channels
from engine.inference.predictor import open_weights
from engine.report.gallery import DrawnDetections
from tools.check.duplicates import image_issues
from tools.check.issue_kinds import summary_lines
from tools.check.label_checks import box_pairs, box_sizes, class_use, scan_dataset, scan_issues
from tools.check.label_errors import label_issues
from tools.check.page import make_out, write_page
from utils.config.settings import TrainConfig, ValConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.machine.resources import available_cores
from utils.strings import class_difference, counted


@dataclass(frozen=True)
class CheckOptions:
    """Holds the flags of a check."""

    data: str
    splits: tuple[str, ...]  # empty: all
    imgsz: int  # 0: the checkpoint's, or that of training
    weights: str  # "" for a check without a model
    trust: bool
    min_score: float  # least probability of label errors that are reported
    device: str
    workers: int  # below 0: one per core
    out: Path | None  # folder of the page
    noplots: bool


@dataclass(frozen=True)
class _ModelFindings:
    """Holds what a model says about the labels."""

    issues: list[Issue] = field(default_factory=list)
    detections: dict[str, DrawnDetections] = field(default_factory=dict)  # by split
    trust: list[str] = field(default_factory=list)  # lines of the summary: how far the model is to be trusted


def check_dataset(options: CheckOptions) -> tuple[dict[str, Any], list[str]]:
    """Checks the data set. Returns the content of the JSON, and the lines of the summary."""
    config = ValConfig(weights=options.weights, imgsz=options.imgsz, workers=options.workers)
    model = _open_model(options, config)
    spec = _open_data(options, model)
    imgsz = options.imgsz or TrainConfig.imgsz
    if model is not None:
        imgsz = canvases_of(config, model).imgsz
    workers = available_cores() if options.workers < 0 else options.workers
    scanned = scan_dataset(spec, tuple(dict.fromkeys(options.splits or spec.splits)), workers=workers)
    issues = _data_issues(scanned, imgsz, workers)
    by_model = _ModelFindings()
    if model is not None:
        by_model = _check_labels(model, config, spec, scanned, options.min_score)
    issues += by_model.issues
    lines = by_model.trust + (summary_lines(issues) or ["nothing to report"])
    report = None
    if not options.noplots:
        report = write_page(
            options.out,
            spec,
            scanned,
            issues,
            by_model.detections,
            by_model.trust,
            imgsz=imgsz,
            weights=options.weights,
        )
    if report:
        lines.append(f"report: {report}")
    content = {
        "data": spec.source,
        "root": str(spec.root),
        "imgsz": imgsz,
        "report": str(report) if report else None,
        "splits": {split.name: dict(split.index.report.totals) for split in scanned},
        "model": by_model.trust,
        "issues": [issue.content() for issue in issues],
    }
    return content, lines


def _open_model(options: CheckOptions, config: ValConfig) -> InferenceModel | None:
    """Opens the model; None without one. Raises UserError if it cannot detect at the size of ``config``."""
    if not options.weights:
        return None
    model = open_weights(options.weights, device=options.device, trust=options.trust)
    check_size(config, model)
    return model


def _open_data(options: CheckOptions, model: InferenceModel | None) -> DatasetSpec:
    """Opens the data set, and makes the folder of the page if it is named. Raises UserError if a split is missing, or
    the model has other classes or channels."""
    spec = open_data(DataSource(options.data), DistributedContext.single())
    if model is not None:
        difference = class_difference(model.names, spec.names)
        if difference:
            raise UserError(
                f"--weights {options.weights}: the classes of the model and of the data set differ ({difference})"
            )
        check_channels(model, spec)
    for split in options.splits:
        spec.split(split)
    if options.out:
        make_out(spec, options.out)
    return spec


def _data_issues(scanned: list[CheckedSplit], imgsz: int, workers: int) -> list[Issue]:
    """Returns what can be found without a model."""
    issues = [issue for split in scanned for issue in scan_issues(split)]
    issues += image_issues(scanned, max(workers, 1))
    issues += [issue for split in scanned for issue in box_pairs(split)]
    issues += box_sizes(scanned, imgsz)
    issues += class_use(scanned)
    return issues


def _check_labels(
    model: InferenceModel, config: ValConfig, spec: DatasetSpec, scanned: list[CheckedSplit], min_score: float
) -> _ModelFindings:
    """Returns the label errors that a model finds."""
    issues, detections, results = label_issues(config, model, spec, scanned, min_score)
    epochs = model.info.get("progress", {}).get("epoch", 0)
    title = Path(config.weights).name
    if type(epochs) is int and epochs > 0:
        title += f" (after {counted(epochs, 'epoch')})"
    return _ModelFindings(issues, detections, trust_lines(title, results, spec.names, issues))
