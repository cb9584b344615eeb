"""Reports missing and refused splits, and the findings of the scan in the files of the others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from data.dataset.spec import IGNORED, DatasetSpec
from data.index.index import Scan
from data.labels.findings import NO_LABEL, UNKNOWN_CLASS, Finding
from engine.issues.issue import CheckedSplit, Issue, LabelBox, learned_names
from tools.check.issue_kinds import MISSING_SPLIT, NO_OBJECTS, REFUSED
from utils.errors import UserError


def missing_splits(spec: DatasetSpec) -> list[Issue]:
    """Returns an issue for each split that training needs and ``spec`` does not have, with the error of training."""
    issues: list[Issue] = []
    for split in ("train", "val"):
        try:
            spec.split(split)
        except UserError as error:
            issues.append(Issue(MISSING_SPLIT, str(error)))
    return issues


def refused_splits(splits: Iterable[CheckedSplit]) -> list[Issue]:
    """Returns an issue for each message with which training or scoring refuses one of ``splits``."""
    return [Issue(REFUSED, refusal, split.name) for split in splits for refusal in split.refusals]


def without_objects(splits: Iterable[CheckedSplit]) -> list[Issue]:
    """Returns an issue for each split other than train that has no objects; for train, this is a refusal. Splits that
    are refused, as those that have lost their objects, are left out."""
    return [
        Issue(NO_OBJECTS, split.objects_problem, split.name)
        for split in splits
        if split.objects_problem and not split.refusals
    ]


def scan_issues(split: CheckedSplit) -> list[Issue]:
    """Converts the findings of the scan to issues, sorted by kind."""
    issues = [issue for part in split.parts for issue in _issues_of(split, part)]
    return sorted(issues, key=lambda issue: issue.kind)


def _issues_of(split: CheckedSplit, part: Scan) -> list[Issue]:
    """Converts the findings in a part of a split to issues; findings in shards name no images.

    If no image has a label file, the split is refused, and the missing label files are one mistake, not one per image.
    """
    issues = []
    for finding in part.findings:
        if finding.kind == NO_LABEL and not part.has_labels:
            continue
        location = split.relative(part, finding.where)
        images: tuple[str, ...] = ()
        if part.source is not None and finding.image >= 0:
            images = (split.relative(part, part.source.images[finding.image]),)
        box = _finding_box(split, part, finding, location)
        issue = Issue(
            finding.kind, finding.text, split.name, images=images, where=location, boxes=() if box is None else (box,)
        )
        issues.append(issue)
    return issues


def _finding_box(split: CheckedSplit, part: Scan, finding: Finding, location: str) -> LabelBox | None:
    """Returns the labeled box that a finding is about; None if there is no such box, or its corners are not finite."""
    if not finding.xyxy_px or not np.isfinite(finding.xyxy_px).all():
        return None
    if finding.class_id < 0 or finding.kind == UNKNOWN_CLASS:
        name = finding.text
    else:
        name = learned_names(part)[finding.class_id] or part.spec.as_labeled().names[finding.class_id]
    number = split.index.names.index(name) if name in split.index.names else IGNORED
    return LabelBox(name, number, finding.xyxy_px, where=location)
