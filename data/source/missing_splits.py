"""Leaves out splits that have no images and that a command does not need, and logs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from data.source.dataset_spec import DatasetSpec, ListedSplit, Split
from data.source.listing.other_splits import is_missing_or_empty, share_labels
from utils.errors import UserError
from utils.logger import get_logger


def without_empty(spec: DatasetSpec, splits: Iterable[str]) -> DatasetSpec:
    """Returns ``spec`` without those of ``splits`` whose folders and lists are all missing or empty, and logs each."""
    left_out: dict[str, Split] = {}
    for name in splits:
        if name not in spec.splits:
            continue
        if not all(is_missing_or_empty(entry, part) for part, entry in _image_entries(spec, name)):
            continue
        _log_left_out(spec, name)
        left_out[name] = spec.splits[name]
    remaining = {name: split for name, split in spec.splits.items() if name not in left_out}
    return replace(spec, splits=remaining, left_out=left_out)


def warn_of_unused_splits(spec: DatasetSpec, used: Collection[str]) -> None:
    """Logs a warning about each split that is not in ``used`` and could not be read, or has no images although its
    labels may be in annotations of the others. This includes the splits of data sets that a split in ``used`` joins.

    If ``used`` is empty, any split may be used: only splits without images whose labels others may have are logged.
    """
    joined = [part for name in used if name in spec.splits for part in spec.parts_of(name)]
    for part in {part.source: part for part in (spec, *joined)}.values():
        for name in part.splits:
            if name not in used:
                _warn_of_unused_split(part, name, is_any_used=bool(used))


def _log_left_out(spec: DatasetSpec, split: str) -> None:
    """Logs that a split without images is left out, as a warning if it is missing: its name may be misspelled."""
    consequence = "is left out"
    if split == "val":
        consequence += ", and part of 'train' is held out in its place"
    consequence += _note_on_losses(spec, split)
    entries = _image_entries(spec, split)
    for part, entry in entries:
        if not entry.exists():
            get_logger().warning("%s; '%s' %s", part.missing_error(entry), split, consequence)
            return
    get_logger().info("%s: '%s' (%s) has no images and %s", spec.source, split, entries[0][1], consequence)


def _warn_of_unused_split(spec: DatasetSpec, split: str, *, is_any_used: bool) -> None:
    """Implements `warn_of_unused_splits` for one split."""
    note = _note_on_losses(spec, split)
    if not is_any_used and not note:
        return
    try:
        spec.check_split(split)
        entries = _image_entries(spec, split) if note else []
        empty = [entry for part, entry in entries if is_missing_or_empty(entry, part)]
    except UserError as error:
        get_logger().warning("%s; '%s' is not used here%s", error, split, note)
        return
    if empty:
        get_logger().warning("%s: '%s' has no images in %s%s", spec.source, split, empty[0], note)


def _image_entries(spec: DatasetSpec, split: str) -> list[tuple[DatasetSpec, Path]]:
    """Returns the folders, lists and shards of a split, each with the data set that names it."""
    entries: list[tuple[DatasetSpec, Path]] = []
    for part in spec.parts_of(split):
        part_split = part.splits[split]
        paths = part_split.images if isinstance(part_split, ListedSplit) else part_split.paths
        entries += [(part, path) for path in paths]
    return entries


def _note_on_losses(spec: DatasetSpec, split: str) -> str:
    """Returns a note for the log if other splits have labels where those of ``split``, whose images are missing, may
    be; else ""."""
    listed_splits = spec.listed_splits
    annotations = listed_splits[split].annotations if split in listed_splits else None
    others = [other.annotations for name, other in listed_splits.items() if name != split]
    if annotations is None or not any(share_labels(annotations, other) for other in others):
        return ""
    return f"; labels in {annotations} that may be of its images do not count as lost"
