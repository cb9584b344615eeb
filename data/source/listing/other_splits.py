"""Compares a split with the other splits of its data set: their order, images, annotations, and missing folders."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from data.images.kinds import image_suffixes, is_image
from data.source.dataset_spec import DatasetSpec, ListedSplit
from data.source.listing.list_rows import is_list, read_rows
from data.source.walk import walk
from utils.errors import UserError


def splits_before(spec: DatasetSpec, split: str) -> list[str]:
    """Returns the splits that the data set names before ``split``."""
    return list(itertools.takewhile(lambda name: name != split, spec.splits))


def splits_with_other_images(spec: DatasetSpec, split: str) -> list[str]:
    """Returns the splits that name other folders or lists than ``split``. This excludes the training split for a "val"
    that is held out from it, and vice versa."""
    splits = spec.listed_splits
    own_paths = _real_paths(splits[split].images)
    return [name for name, other in splits.items() if _real_paths(other.images) != own_paths]


def share_labels(first: Path | None, second: Path | None) -> bool:
    """Returns whether the label files of two splits may be in the same folder. None: YOLO txt next to the images."""
    if first is None or second is None:
        return first is None and second is None
    return first.is_relative_to(second) or second.is_relative_to(first)


def entries_without_images(spec: DatasetSpec, split: str) -> list[Path]:
    """Returns the folders and lists of other splits that are missing or empty, if the labels of their images may be in
    the annotations of ``split``. A list that only names missing images is not among them: its rows are
    `SplitImages.missing`."""
    splits = spec.listed_splits
    annotations = splits[split].annotations
    if annotations is None:
        return []
    others = [splits[name] for name in splits_with_other_images(spec, split)]
    others += [other for other in spec.left_out.values() if isinstance(other, ListedSplit)]
    entries = [entry for other in others if share_labels(annotations, other.annotations) for entry in other.images]
    return [entry for entry in dict.fromkeys(entries) if _is_without_images(entry, spec)]


def is_missing_or_empty(entry: Path, spec: DatasetSpec) -> bool:
    """Returns whether an entry of a split does not exist, is a folder without images, or a .txt list without rows.
    ``spec``: the data set that names the entry."""
    if entry.is_dir():
        suffixes = image_suffixes(spec.pixels)
        return not any(is_image(file.name, suffixes) for visit in walk(entry) for file in visit.entries)
    if is_list(entry):
        return not read_rows(entry)
    return not entry.exists()


def _is_without_images(entry: Path, spec: DatasetSpec) -> bool:
    """Returns whether an entry `is_missing_or_empty` or cannot be read, which is reported when it is used."""
    try:
        return is_missing_or_empty(entry, spec)
    except (UserError, PermissionError):
        return True


def _real_paths(entries: Iterable[Path]) -> list[str]:
    return sorted(map(os.path.realpath, entries))
