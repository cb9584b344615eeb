"""Scans the splits of a data set, and reports missing and refused ones and the findings in the files of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from data.dataset.spec import IGNORED, DatasetSpec
from data.index.index import IndexSettings, Scan
from data.index.load import read_split
from data.index.messages import log_split, no_object, problems
from data.labels.findings import UNKNOWN_CLASS, Finding
from engine.report.label_errors import CheckedSplit, Issue, LabelBox, learned_names
from tools.check.issue_kinds import MISSING_SPLIT, NO_OBJECTS, REFUSED, UNREADABLE_SPLIT
from utils.errors import UserError


def scan_splits(spec: DatasetSpec, names: Sequence[str], *, workers: int) -> tuple[list[CheckedSplit], list[Issue]]:
    """Scans the splits ``names`` and decodes all their images; nothing is cached. Raises UserError as `load_index`.

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
    loaded = read_split(spec, name, settings)
    log_split(loaded, title=name)
    return CheckedSplit(
        name=name,
        index=loaded.used,
        parts=loaded.scans,
        refusals=tuple(problems(loaded, settings.max_bad)),
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
        for finding in part.findings:
            where = split.relative(part, finding.where)
            images: tuple[str, ...] = ()
            if part.source is not None and finding.image >= 0:
                images = (split.relative(part, part.source.images[finding.image]),)
            boxes = _finding_boxes(split, part, finding, where)
            issues.append(Issue(finding.kind, finding.text, split.name, images=images, where=where, boxes=boxes))
    return sorted(issues, key=lambda issue: issue.kind)


def _finding_boxes(split: CheckedSplit, part: Scan, finding: Finding, where: str) -> tuple[LabelBox, ...]:
    """Returns the labeled box that a finding is about; none without finite corners."""
    if not finding.xyxy_px or not np.isfinite(finding.xyxy_px).all():
        return ()
    if finding.class_id < 0 or finding.kind == UNKNOWN_CLASS:
        name = finding.text
    else:
        name = learned_names(part)[finding.class_id] or part.spec.as_labeled().names[finding.class_id]
    number = split.index.names.index(name) if name in split.index.names else IGNORED
    return (LabelBox(name, number, finding.xyxy_px, where=where),)
