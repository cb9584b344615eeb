"""Finds the label file of each image, in formats with one per image (rules D1 to D3).

The place of a label file is a function of the image's path as written; links are not resolved. With the stem of the
image and the suffix of the format, it is

- in the folder in which the last ``images`` of the path is ``labels``, or beside the image if there is no such folder;
- if the data set names a folder of ``annotations``, at the same path below it, which is the longest end of the image's
  path that exists there, or else directly in it: ``train/p/x.xml``, ``p/x.xml`` or ``x.xml`` for
  ``images/train/p/x.png``.

A name that differs only in case or Unicode composition counts if it is the only one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.dataset.spec import DatasetSpec, FilesSplit
from data.labels.findings import ORPHAN, Finding
from data.labels.label_format import MAX_BYTES
from data.listing.folders import ABSENT, Folders, stamp_of
from data.listing.images import SplitImages, find_images_beside, find_other_images
from utils.files.paths import casefold_nfc, path_of
from utils.files.safe_io import read_regular
from utils.strings import counted

_UNREADABLE = (0, 0)  # stamp of a label file that exists but cannot be read: the scan reports it


@dataclass(frozen=True)
class SplitLabels:
    """The label files of a split's images. Names are relative to the data set's folder."""

    names: list[str]  # N: the label file of each image, sorted by the image's name, or where it would be
    stamps: np.ndarray  # int64 (N, 2); `ABSENT` where there is none
    claimed: set[str]  # label files that are named like an image, even if it is not known of which one they are

    @property
    def existing(self) -> set[str]:
        """The label files that exist."""
        return {name for name, size in zip(self.names, self.stamps[:, 0].tolist()) if size >= 0}


class _Claim(NamedTuple):
    """A label file that is named like an image."""

    image: int
    image_folder: str
    num_dropped: int  # leading folders of the image's path without which the label file is at the same path


def find_labels(split: FilesSplit, images: SplitImages, folders: Folders) -> SplitLabels:
    """Finds the label files of ``images``."""
    names = sorted(images.stamps)
    positions: dict[str, list[int]] = {}  # of the images, by the start of their names
    for i, name in enumerate(names):
        positions.setdefault(name[: name.rfind("/") + 1], []).append(i)
    label_names = [""] * len(names)
    claims: dict[str, list[_Claim]] = {}
    for prefix, group in positions.items():
        image_folder = images.folders[prefix]
        expected, places = places_of_labels(image_folder, split.annotations, folders)
        expected_prefix = folders.prefix(expected)
        for i in group:
            label = names[i][len(prefix) :].rpartition(".")[0] + split.label_format.suffix
            label_names[i] = expected_prefix + label
            for num_dropped, place in places:
                existing = folders.find(place, label)
                if existing is not None:
                    claim = _Claim(i, image_folder, num_dropped)
                    claims.setdefault(folders.prefix(place) + existing, []).append(claim)
                    break
    stamps = np.full((len(names), 2), ABSENT, np.int64)
    for label, of_label in claims.items():
        stamp = stamp_of(path_of(label, folders.root))
        for claim in _best(of_label):
            label_names[claim.image] = label
            stamps[claim.image] = _UNREADABLE if stamp == ABSENT else stamp
    return SplitLabels(label_names, stamps, set(claims))


def _best(claims: list[_Claim]) -> list[_Claim]:
    """Returns the claims of a label file that drop the fewest folders. If images of several folders have these, the
    file is not known to be of any, and the result is empty."""
    if len(claims) == 1:
        return claims
    fewest = min(claim.num_dropped for claim in claims)
    best = [claim for claim in claims if claim.num_dropped == fewest]
    return best if len({claim.image_folder for claim in best}) == 1 else []


def places_of_labels(
    image_folder: str, annotations: Path | None, folders: Folders
) -> tuple[str, list[tuple[int, str]]]:
    """Returns the folder where the label files of the images in ``image_folder`` are expected; and the existing ones,
    the first of which with a file of the name counts, with the number of folders that each drops."""
    if annotations is not None:
        parts = [part for part in folders.prefix(image_folder).split("/") if part not in ("", "..")]
        below = [(i, folders.find_below(str(annotations), parts[i:])) for i in range(len(parts) + 1)]
        places = [(i, place) for i, place in below if place is not None and os.path.isdir(place)]
        return places[0][1], places
    parts = image_folder.split("/")
    for i in reversed(range(1, len(parts))):
        if casefold_nfc(parts[i]) == "images":
            above = "/".join(parts[:i]) or "/"
            place = folders.find_below(above, ["labels", *parts[i + 1 :]])
            expected = place or "/".join([*parts[:i], "labels", *parts[i + 1 :]])
            return expected, [(0, place or image_folder)]
    return image_folder, [(0, image_folder)]


def find_orphans(
    spec: DatasetSpec, split: str, images: SplitImages, labels: SplitLabels, folders: Folders
) -> list[Finding]:
    """Returns a finding for each label file with a row, in the label folders of the split, that no image has.

    A file may be of an image beside those of this split, as with a list of a part of the images; then it is none. Files
    in a folder of ``annotations`` that another split names, too, may be of its images; if these are missing, nothing is
    known about the files.
    """
    split_spec = spec.splits[split]
    assert isinstance(split_spec, FilesSplit)
    suffix = split_spec.label_format.suffix
    used = labels.existing
    orphans = {
        folders.prefix(folder) + name
        for folder in _label_folders(split_spec, images, folders)
        for name, entry in folders.entries(folder).items()
        if name[-len(suffix) :].lower() == suffix and not entry.is_dir()
    } - used
    if orphans:
        orphans -= find_labels(split_spec, find_images_beside(images, spec, folders), folders).claimed
    if orphans and split_spec.annotations is not None:
        labels_of_others = _labels_of_other_splits(spec, split, folders)
        if labels_of_others is None:
            return []
        orphans -= labels_of_others
    findings = [_orphan(name, split_spec, folders) for name in sorted(orphans)]
    return [finding for finding in findings if finding is not None]


def _label_folders(split: FilesSplit, images: SplitImages, folders: Folders) -> set[str]:
    """Returns the folders of label files of a split, also those without an image, such as of a missing image folder."""

    def places(image_folders: Iterable[str]) -> set[str]:
        return {place for folder in image_folders for _, place in places_of_labels(folder, None, folders)[1]}

    if split.annotations is not None:
        return set(folders.walk(str(split.annotations)))
    tops = places(str(entry) for entry in split.images if os.path.isdir(entry))
    return places(images.folders.values()).union(*map(folders.walk, tops))


def _labels_of_other_splits(spec: DatasetSpec, split: str, folders: Folders) -> set[str] | None:
    """Returns the label files of the other splits in the same folder of annotations. Returns None if one of these has
    no images here."""
    annotations = spec.splits[split].paths[-1]
    names: set[str] = set()
    for name, other in (spec.splits | spec.left_out).items():
        if name == split or not isinstance(other, FilesSplit) or other.annotations is None:
            continue
        if not (other.annotations.is_relative_to(annotations) or annotations.is_relative_to(other.annotations)):
            continue
        images = find_other_images(spec, name, folders)
        if images is None:
            return None
        names |= find_labels(other, images, folders).existing
    return names


def _orphan(name: str, split: FilesSplit, folders: Folders) -> Finding | None:
    """Returns the finding about a label file without an image, None for a file without a row."""
    try:
        num_objects = split.label_format.num_objects(read_regular(path_of(name, folders.root), MAX_BYTES))
    except OSError:  # what it contains is unknown
        num_objects = 1
    if not num_objects:
        return None
    text = f"no image of its name; {counted(num_objects, 'object')}"
    return Finding(name, ORPHAN, text, number=num_objects, lost_objects=num_objects)
