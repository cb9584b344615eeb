"""Scans the splits of a data set for the checks."""

from __future__ import annotations

from data.dataset.spec import DatasetSpec
from data.index.index_settings import IndexSettings
from data.index.load import scan_for_check
from engine.issues.issue import CheckedSplit, Issue
from tools.check.issue_kinds import UNREADABLE_SPLIT
from utils.errors import UserError


def scan_dataset(spec: DatasetSpec, splits: tuple[str, ...], *, workers: int) -> list[CheckedSplit]:
    """Scans ``splits`` and decodes all images; nothing is cached. Raises UserError as `load_index`."""
    return [_scan_split(spec, split, workers) for split in splits]


def scan_readable(spec: DatasetSpec, *, workers: int) -> tuple[list[CheckedSplit], list[Issue]]:
    """Scans all splits as `scan_dataset` does. A split that cannot be read is only an issue, because some data sets are
    published without the images of their test split. Raises the first error if no split can be read."""
    scanned: list[CheckedSplit] = []
    errors: dict[str, UserError] = {}  # by split
    for split in spec.splits:
        try:
            scanned.append(_scan_split(spec, split, workers))
        except UserError as error:
            errors[split] = error
    if not scanned:
        raise next(iter(errors.values()))
    return scanned, [Issue(UNREADABLE_SPLIT, str(error), split) for split, error in errors.items()]


def _scan_split(spec: DatasetSpec, split: str, workers: int) -> CheckedSplit:
    scanned = scan_for_check(spec, split, IndexSettings(workers=workers))
    return CheckedSplit(
        name=split,
        index=scanned.index,
        parts=scanned.scans,
        refusals=scanned.refusals,
        objects_problem=scanned.objects_problem,
    )
