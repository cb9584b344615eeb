"""Checks a data set, with a model if one is given. Needs torch, unlike __main__.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.dataset.spec import DatasetSpec, DataSource
from data.open import open_data, problem_of_output
from engine.inference.model_data import check_channels
from engine.inference.open_model import open_weights
from engine.inference.settings import resolve_imgsz
from engine.report.label_errors import CheckedSplit, Issue, by_kind
from tools.check.boxes import box_pairs, box_sizes
from tools.check.class_use import class_use
from tools.check.duplicates import image_issues
from tools.check.issue_kinds import advice_about
from tools.check.label_errors import LabelErrors, examine_labels
from tools.check.scan import refused_splits, scan_issues, scan_splits
from utils.class_names import class_difference
from utils.config.settings import TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import check_output_folder
from utils.machine.resources import available_cores

MAX_LISTED = 3  # issues of each kind in the summary


@dataclass(frozen=True)
class CheckResult:
    """All issues of a data set, for the terminal, the JSON and the page."""

    spec: DatasetSpec
    splits: list[CheckedSplit]
    issues: list[Issue]  # including label errors
    label_errors: LabelErrors
    imgsz: int  # longer image side in training, pixels
    weights: str  # "" without a model

    def summary(self) -> list[str]:
        """Returns the lines for the terminal: the number of issues of each kind, its meaning, and the first few."""
        lines = list(self.label_errors.trust_notes)
        for kind, group in by_kind(self.issues).items():
            meaning = advice_about(kind).meaning
            lines.append(f"{kind}: {len(group):,}{f' ({meaning})' if meaning else ''}")
            lines += [f"  {issue}" for issue in group[:MAX_LISTED]]
            if len(group) > MAX_LISTED:
                lines.append(f"  ... and {len(group) - MAX_LISTED:,} more")
        return lines if self.issues else [*lines, "nothing to report"]

    def content(self, report: Path | None) -> dict[str, Any]:
        """Returns the content of the JSON. ``report``: path of the page; None if there is none."""
        return {
            "data": self.spec.source,
            "root": str(self.spec.root),
            "imgsz": self.imgsz,
            "report": None if report is None else str(report),
            "splits": {
                split.name: split.index.counts() | {total.kind: total.number for total in split.index.report.kinds}
                for split in self.splits
            },
            "model": self.label_errors.trust_notes,
            "issues": [issue.content() for issue in self.issues],
        }


def check_dataset(config: CheckConfig) -> CheckResult:
    """Checks the data set. Raises UserError if the settings or the data cannot be used, if the model has other classes
    or channels, or cannot detect at ``--imgsz``, or if ``--out`` is among the images. Creates nothing."""
    model = None
    imgsz = config.imgsz or TrainConfig.imgsz
    if config.weights:
        model = open_weights(config.weights, device=config.device, trust=config.trust)
        imgsz = resolve_imgsz(config.imgsz, model)
    spec = open_data(DataSource(config.data), DistributedContext.single())
    if model is not None:
        difference = class_difference(model.names, spec.names)
        if difference:
            raise UserError(
                f"--weights {config.weights}: the classes of the model and of the data set differ ({difference})"
            )
        check_channels(model, spec)
    for name in config.split:
        spec.split(name)
    if config.out:
        problem = problem_of_output(Path(config.out), spec)
        if problem:
            raise UserError(f"--out {config.out}: {problem}; name another folder")
        check_output_folder(Path(config.out))
    workers = available_cores() if config.workers < 0 else config.workers
    splits, issues = scan_splits(spec, config.split, workers=workers)
    issues += refused_splits(splits)
    issues += [issue for split in splits for issue in scan_issues(split)]
    issues += image_issues(splits, max(workers, 1))
    issues += [issue for split in splits for issue in box_pairs(split)]
    issues += box_sizes(splits, imgsz)
    issues += class_use(splits)
    label_errors = LabelErrors()
    if model is not None:
        validation = ValConfig(weights=config.weights, imgsz=config.imgsz, workers=config.workers)
        label_errors = examine_labels(validation, model, spec, splits, min_score=config.min_score)
    issues += label_errors.issues
    return CheckResult(spec, splits, issues, label_errors, imgsz, config.weights)
