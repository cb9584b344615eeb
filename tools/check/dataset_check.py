"""Checks a data set, with a model if one is given: scans its splits, and collects their issues. Needs torch, unlike
__main__.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.findings import KINDS, UNKNOWN_CLASS, Finding
from data.index import IndexSettings, LoadedSplit
from data.load import log_split, no_object, read_split, refusal_reasons
from data.open import open_data, problem_of_output
from data.spec import IGNORED, DatasetSpec, DataSource
from engine.commands.val import score
from engine.inference.model import InferenceModel, open_model, resolve_imgsz
from engine.inference.model_data import check_channels
from engine.report.label_errors import (
    CheckedSplit,
    Issue,
    IssueKind,
    LabelBox,
    find_label_errors,
    learned_names,
    unjudged_classes,
)
from tools.check.duplicates import image_issues
from tools.check.labels import box_pairs, box_sizes, class_use
from utils.class_names import class_difference
from utils.config.settings import TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import check_output_folder
from utils.machine.resources import available_cores

MIN_SCORE = 0.3  # of the label errors that are reported
MISSING_SPLIT = IssueKind(
    "missing split", "training refuses the data set as it is", "add the split; for 'val', --val-fraction 0.2 is enough"
)
REFUSED = IssueKind("refused split", "training, or scoring on it, ends with this message", "see the message")
UNREADABLE_SPLIT = IssueKind(
    "unreadable split", "the other splits are checked", "restore its files, or name the other splits with --split"
)
NO_OBJECTS = IssueKind(
    "split without objects", "nothing can be scored; if it is 'val', training writes no best.pt", "label its objects"
)


@dataclass(frozen=True)
class CheckResult:
    """All issues of a data set."""

    spec: DatasetSpec
    splits: list[CheckedSplit]
    issues: list[Issue]  # including label errors
    trust_notes: list[str]  # lines about how far to trust the model; none without a model
    imgsz: int  # longer image side in training, pixels
    weights: str  # "" without a model


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
    found: dict[tuple[IssueKind, str, str], Issue] = {}  # once, if splits share a folder
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
    """Scans the splits ``names`` and decodes all their images; nothing is cached. Also returns what training or scoring
    refuses. Raises UserError as `load_split`.

    Without ``names``, scans all splits. Then a split that is missing or cannot be read is only an issue, because some
    data sets are published without the images of their test split; the first error is raised if none can be read.
    """
    splits: list[CheckedSplit] = []
    issues: list[Issue] = []
    errors: list[UserError] = []
    settings = IndexSettings(workers=workers, decode_all=True, use_cache=False)
    for name in () if names else ("train", "val"):
        try:
            spec.split(name)
        except UserError as error:
            issues.append(Issue(MISSING_SPLIT, str(error)))
    for name in dict.fromkeys(names or spec.splits):
        try:
            loaded = read_split(spec, name, settings, {})
        except UserError as error:
            if names:
                raise
            errors.append(error)
            issues.append(Issue(UNREADABLE_SPLIT, str(error), name))
            continue
        log_split(loaded, title=name)
        splits.append(CheckedSplit(name, loaded.used, loaded.sources))
        refusals = [Issue(REFUSED, reason, name) for reason in refusal_reasons(loaded, TrainConfig.max_bad)]
        without_objects = no_object(loaded)
        if without_objects and not refusals:
            refusals.append(Issue(NO_OBJECTS, without_objects, name))
        issues += refusals
    if not splits:
        raise errors[0]
    return splits, issues


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
            meaning, remedy = (
                KINDS[finding.kind][:2] if finding.kind in KINDS else ("", "")
            )  # shards of another version
            kind = IssueKind(finding.kind, meaning, remedy)
            issues.append(Issue(kind, finding.text, split.name, images=images, where=where, boxes=boxes))
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
            note = f"{Path(config.weights).name} has AP {result.ap:.3f} on {split.name}."
            notes.append(" ".join([note, *unjudged_classes(class_ap50, spec.names)]))
    issues.sort(key=lambda issue: issue.score or 0.0, reverse=True)
    return issues, notes
