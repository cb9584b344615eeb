"""Checks a data set, with a model if one is given: scans its splits, and collects their issues. Needs torch, unlike
__main__.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.findings import UNKNOWN_CLASS, Finding
from data.index import IndexSettings, LoadedSplit
from data.load import log_split, no_object, read_split, refusal_reasons
from data.open import open_data, problem_of_output
from data.spec import IGNORED, DatasetSpec, DataSource
from engine.commands.val import score
from engine.inference.model import InferenceModel, open_model, resolve_imgsz
from engine.inference.model_data import check_channels
from engine.report.issues import CheckedSplit, Issue, LabelBox, by_kind, learned_names
from engine.report.label_errors import find_label_errors, unjudged_classes
from tools.check.boxes import box_pairs, box_sizes
from tools.check.class_use import class_use
from tools.check.duplicates import image_issues
from tools.check.issue_kinds import MISSING_SPLIT, NO_OBJECTS, REFUSED, UNREADABLE_SPLIT, advice_about
from utils.class_names import class_difference
from utils.config.settings import TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import check_output_folder
from utils.machine.resources import available_cores

MIN_SCORE = 0.3  # of the label errors that are reported
MAX_LISTED = 3  # issues of each kind in the summary


@dataclass(frozen=True)
class CheckResult:
    """All issues of a data set, for the terminal, the JSON and the page."""

    spec: DatasetSpec
    splits: list[CheckedSplit]
    issues: list[Issue]  # including label errors
    trust_notes: list[str]  # lines about how far to trust the model; none without a model
    imgsz: int  # longer image side in training, pixels
    weights: str  # "" without a model

    def summary(self) -> list[str]:
        """Returns the lines for the terminal: the number of issues of each kind, its meaning, and the first few."""
        lines = list(self.trust_notes)
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
            "model": self.trust_notes,
            "issues": [issue.content() for issue in self.issues],
        }


def check_dataset(config: CheckConfig) -> CheckResult:
    """Checks the data set. Raises UserError if the settings or the data cannot be used, if the model has other classes
    or channels, or cannot detect at ``--imgsz``, or if ``--out`` is among the images. Creates nothing."""
    model = None
    imgsz = config.imgsz or TrainConfig.imgsz
    if config.weights:
        model = open_model(config.weights, device=config.device, trust=config.trust)
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
    workers = available_cores()
    splits, issues = scan_splits(spec, config.split, workers=workers)
    issues += refused_splits(splits)
    found: dict[tuple[str, str, str], Issue] = {}  # once, if splits share a folder
    for issue in (issue for split in splits for issue in scan_issues(split)):
        found.setdefault((issue.kind, issue.where, issue.text), issue)
    issues += found.values()
    issues += image_issues(splits, workers)
    issues += [issue for split in splits for issue in box_pairs(split)]
    issues += box_sizes(splits, imgsz)
    issues += class_use(splits)
    trust_notes: list[str] = []
    if model is not None:
        validation = ValConfig(weights=config.weights, imgsz=config.imgsz)
        label_errors, trust_notes = examine_labels(validation, model, spec, splits)
        issues += label_errors
    return CheckResult(spec, splits, issues, trust_notes, imgsz, config.weights)


def scan_splits(spec: DatasetSpec, names: Sequence[str], *, workers: int) -> tuple[list[CheckedSplit], list[Issue]]:
    """Scans the splits ``names`` and decodes all their images; nothing is cached. Raises UserError as `load_split`.

    Without ``names``, scans all splits. Then a split that is missing or cannot be read is only an issue, because some
    data sets are published without the images of their test split; the first error is raised if none can be read.
    """
    splits: list[CheckedSplit] = []
    issues: list[Issue] = []
    errors: list[UserError] = []
    for name in () if names else ("train", "val"):
        try:
            spec.split(name)
        except UserError as error:
            issues.append(Issue(MISSING_SPLIT, str(error)))
    for name in dict.fromkeys(names or spec.splits):
        try:
            splits.append(scan_split(spec, name, workers=workers))
        except UserError as error:
            if names:
                raise
            errors.append(error)
            issues.append(Issue(UNREADABLE_SPLIT, str(error), name))
    if not splits:
        raise errors[0]
    return splits, issues


def scan_split(spec: DatasetSpec, name: str, *, workers: int) -> CheckedSplit:
    """Scans a split as `scan_splits` does."""
    settings = IndexSettings(workers=workers, decode_all=True, use_cache=False)
    loaded = read_split(spec, name, settings, {})
    log_split(loaded, title=name)
    return CheckedSplit(
        name=name,
        index=loaded.used,
        parts=loaded.sources,
        refusals=tuple(refusal_reasons(loaded, TrainConfig.max_bad)),
        objects_problem=no_object(loaded),
    )


def refused_splits(splits: Iterable[CheckedSplit]) -> list[Issue]:
    """Returns an issue for each message with which training or scoring refuses one of ``splits``, and for each other
    split without objects."""
    issues = []
    for split in splits:
        issues += [Issue(REFUSED, refusal, split.name) for refusal in split.refusals]
        if split.objects_problem and not split.refusals:
            issues.append(Issue(NO_OBJECTS, split.objects_problem, split.name))
    return issues


def scan_issues(split: CheckedSplit) -> list[Issue]:
    """Converts the findings of the scan to issues, sorted by kind; findings in shards name no images."""
    issues = []
    for part in split.parts:
        for finding in part.full.report.findings:
            where = split.relative(part, finding.where)
            images: tuple[str, ...] = ()
            boxes: tuple[LabelBox, ...] = ()
            if finding.image_name:
                images = (split.relative(part, finding.image_name),)
                boxes = _finding_boxes(split, part, finding, where)
            issues.append(Issue(finding.kind, finding.text, split.name, images=images, where=where, boxes=boxes))
    return sorted(issues, key=lambda issue: issue.kind)


def _finding_boxes(split: CheckedSplit, part: LoadedSplit, finding: Finding, where: str) -> tuple[LabelBox, ...]:
    """Returns the labeled box that a finding is about; none without finite corners."""
    if not finding.xyxy_px or not np.isfinite(finding.xyxy_px).all():
        return ()
    if finding.class_id < 0 or finding.kind == UNKNOWN_CLASS:
        name = finding.text
    else:
        name = learned_names(part)[finding.class_id] or part.spec.with_label_classes().names[finding.class_id]
    number = split.index.names.index(name) if name in split.index.names else IGNORED
    return (LabelBox(name, number, finding.xyxy_px, where=where),)


def examine_labels(
    config: ValConfig, model: InferenceModel, spec: DatasetSpec, splits: Sequence[CheckedSplit]
) -> tuple[list[Issue], list[str]]:
    """Finds the label errors of all splits with a score of at least `MIN_SCORE`, the highest first, by the detections
    that val.py scores with ``config``. Also returns lines about how far to trust the model."""
    issues: list[Issue] = []
    notes: list[str] = []
    for split in splits:
        settings = replace(config, task=split.name)
        scores = score(settings, model, spec, DistributedContext.single(model.device), index=split.index)
        assert scores is not None, "the only process has the scores"
        result = scores.evaluation.result
        class_ap50 = result.class_metrics["AP50"]
        issues += find_label_errors(split, scores.evaluation.for_ap, class_ap50, MIN_SCORE)
        if result.class_targets.any():
            unjudged = unjudged_classes(class_ap50, spec.names)
            note = f"{Path(config.weights).name} has AP {result.ap:.3f} on {split.name}"
            notes.append(f"{note}; {unjudged}." if unjudged else f"{note}.")
    issues.sort(key=lambda issue: issue.score or 0.0, reverse=True)
    return issues, notes
