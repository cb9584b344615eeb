"""Checks a data set, with a model if one is given. Needs torch, unlike __main__.py."""

from __future__ import annotations

from pathlib import Path

from data.dataset.spec import DatasetSpec, DataSource
from data.open import open_data
from engine.inference.model import InferenceModel
from engine.inference.model_data import check_channels
from engine.inference.open_model import open_weights
from engine.inference.settings import resolve_imgsz
from engine.issues.issue import CheckedSplit, Issue
from tools.check.checks.box_pairs import box_pairs
from tools.check.checks.box_sizes import box_sizes
from tools.check.checks.class_use import class_use
from tools.check.checks.duplicates import image_issues
from tools.check.checks.examine_labels import examine_labels
from tools.check.checks.scan import missing_splits, refused_splits, scan_issues, without_objects
from tools.check.out_folder import check_out
from tools.check.result import CheckResult, LabelErrors
from tools.check.scan_splits import scan_dataset, scan_readable
from utils.class_names import class_difference
from utils.config.settings import TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.machine.resources import available_cores


def check_dataset(config: CheckConfig) -> CheckResult:
    """Checks the data set. Raises UserError if the settings or the data cannot be used."""
    validation = ValConfig(weights=config.weights, imgsz=config.imgsz, workers=config.workers)
    model = _open_model(config)
    spec = _open_data(config, model)
    if config.out:
        check_out(spec, Path(config.out))
    workers = available_cores() if config.workers < 0 else config.workers
    splits, split_issues = _scan(config, spec, workers)
    imgsz = config.imgsz or TrainConfig.imgsz
    if model is not None:
        imgsz = resolve_imgsz(config.imgsz, model)
    issues = [*split_issues, *_data_issues(splits, imgsz, workers)]
    label_errors = LabelErrors()
    if model is not None:
        label_errors = examine_labels(validation, model, spec, splits, min_score=config.min_score)
    issues += label_errors.issues
    return CheckResult(
        spec=spec, splits=splits, issues=issues, label_errors=label_errors, imgsz=imgsz, weights=config.weights
    )


def _open_model(config: CheckConfig) -> InferenceModel | None:
    """Opens the model; returns None if none is given. Raises UserError if it cannot detect at ``--imgsz``."""
    if not config.weights:
        return None
    model = open_weights(config.weights, device=config.device, trust=config.trust)
    resolve_imgsz(config.imgsz, model)  # refuses a size before the data is read
    return model


def _open_data(config: CheckConfig, model: InferenceModel | None) -> DatasetSpec:
    """Opens the data set. Raises UserError if a split is missing, or the model has other classes or channels."""
    spec = open_data(DataSource(config.data), DistributedContext.single())
    if model is not None:
        difference = class_difference(model.names, spec.names)
        if difference:
            raise UserError(
                f"--weights {config.weights}: the classes of the model and of the data set differ ({difference})"
            )
        check_channels(model, spec)
    for split in config.split:
        spec.split(split)
    return spec


def _scan(config: CheckConfig, spec: DatasetSpec, workers: int) -> tuple[list[CheckedSplit], list[Issue]]:
    """Scans the splits that the settings name, or all.

    Returns them and, if all are scanned, issues about splits that are missing or cannot be read. A split that the
    settings name raises UserError if it cannot be read.
    """
    if config.split:
        return scan_dataset(spec, tuple(dict.fromkeys(config.split)), workers=workers), []
    splits, unreadable = scan_readable(spec, workers=workers)
    return splits, [*missing_splits(spec), *unreadable]


def _data_issues(splits: list[CheckedSplit], imgsz: int, workers: int) -> list[Issue]:
    """Returns the issues that can be found without a model."""
    issues = refused_splits(splits)
    issues += without_objects(splits)
    issues += [issue for split in splits for issue in scan_issues(split)]
    issues += image_issues(splits, max(workers, 1))
    issues += [issue for split in splits for issue in box_pairs(split)]
    issues += box_sizes(splits, imgsz)
    issues += class_use(splits)
    return issues
