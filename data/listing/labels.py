"""Finds the label file of each image, in formats with one per image (rules D1 to D3).

The place of a label file is a function of the image's path as written; links are not resolved. With the stem of the
image and the suffix of the format, it is

- in the folder in which the last ``images`` of the path is ``labels``, or beside the image if there is no such folder;
- if the data set names a folder of ``annotations``, at the same path below it, or else directly in it.

A name that differs only in case or Unicode composition counts if it is the only one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.dataset.spec import DatasetSpec, FilesSplit
from data.images.kinds import image_suffixes
from data.labels.findings import ORPHAN, Finding
from data.labels.label_format import MAX_BYTES
from data.labels.match import loose
from data.listing.folders import ABSENT, Folders, stamp_of
from data.listing.images import SplitImages, find_other_images
from utils.files.paths import path_of
from utils.files.safe_io import read_regular
from utils.strings import counted

_UNREADABLE = (0, 0)  # stamp of a label file that exists but cannot be read: the scan reports it


@dataclass(frozen=True)
class SplitLabels:
    """The label files of a split's images. Names are relative to the data set's folder."""

    names: list[str]  # N: the label file of each image, or where it would be
    stamps: np.ndarray  # int64 (N, 2); `ABSENT` where there is none
    folders: dict[str, set[str]]  # folders (absolute) of label files, with the folders of their images

    @property
    def existing(self) -> list[str]:
        """The label files that exist."""
        return [name for name, size in zip(self.names, self.stamps[:, 0].tolist()) if size >= 0]


def find_labels(split: FilesSplit, images: SplitImages, names: list[str], folders: Folders) -> SplitLabels:
    """Finds the label files of the images ``names`` (sorted), which are those of ``images``."""
    positions: dict[str, list[int]] = {}  # of the images, by the start of their names
    for i, name in enumerate(names):
        positions.setdefault(name[: name.rfind("/") + 1], []).append(i)
    label_names = [""] * len(names)
    found = [""] * len(names)  # existing label files, among `label_names`
    label_folders: dict[str, set[str]] = {}
    claims: list[_Claim] = []
    for prefix, group in positions.items():
        image_folder, below = images.folders[prefix]
        place, expected = place_of_labels(image_folder, below, split.annotations, folders)
        label_folders.setdefault(place, set()).add(image_folder)
        folders.entries(place)  # reports a folder that cannot be listed
        expected_prefix = folders.prefix(expected)
        for i in group:
            label = names[i][len(prefix) :].rpartition(".")[0] + split.label_format.suffix
            label_names[i] = expected_prefix + label
            if split.annotations is None:
                existing = folders.find(place, label)
                if existing is not None:
                    found[i] = folders.prefix(place) + existing
                continue
            for is_same_path, folder in ((True, expected), (False, str(split.annotations))):
                existing = None if is_same_path and below is None else folders.find(folder, label)
                if existing is not None:
                    claims.append(_Claim(i, image_folder, folders.prefix(folder) + existing, is_same_path))
                    break
    for claim in _unique(claims):
        found[claim.image] = claim.label
    stamps = np.full((len(names), 2), ABSENT, np.int64)
    for i, label in enumerate(found):
        if label:
            label_names[i] = label
            stamp = stamp_of(path_of(label, folders.root))
            stamps[i] = _UNREADABLE if stamp == ABSENT else stamp
    return SplitLabels(label_names, stamps, label_folders)


class _Claim(NamedTuple):
    """A label file in a folder of annotations that is named like an image."""

    image: int
    image_folder: str
    label: str
    is_same_path: bool  # else it is directly in the folder of annotations


def _unique(claims: Sequence[_Claim]) -> list[_Claim]:
    """Returns the claims of label files that images of a single folder have, those at the same path first. Images of
    several folders may have the same stem, and then the file is not known to be of either."""
    by_label: dict[str, list[_Claim]] = {}
    for claim in claims:
        by_label.setdefault(claim.label, []).append(claim)
    unique: list[_Claim] = []
    for of_label in by_label.values():
        best = [claim for claim in of_label if claim.is_same_path] or of_label
        if len({claim.image_folder for claim in best}) == 1:
            unique += best
    return unique


def place_of_labels(
    image_folder: str, below: str | None, annotations: Path | None, folders: Folders
) -> tuple[str, str]:
    """Returns the existing folder of the label files of the images in ``image_folder``, and the one where they are
    expected. ``below``: the part of ``image_folder`` below the split's folder, None for images of a list."""
    if annotations is not None:
        place = folders.find_below(str(annotations), below.split("/") if below else [])
        return (place, place) if place else (str(annotations), os.path.join(annotations, below or ""))
    parts = image_folder.split("/")
    for i in reversed(range(1, len(parts))):
        if loose(parts[i]) == "images":
            above = "/".join(parts[:i]) or "/"
            place = folders.find_below(above, ["labels", *parts[i + 1 :]])
            return (place, place) if place else (image_folder, "/".join([*parts[:i], "labels", *parts[i + 1 :]]))
    return image_folder, image_folder


def find_orphans(
    spec: DatasetSpec, split: str, images: SplitImages, labels: SplitLabels, folders: Folders
) -> list[Finding]:
    """Returns a finding for each label file with a row, in the label folders of the split, that no image has.

    A file may be of an image that this split does not name, as with a list of a part of the images; then it is none.
    Files in a folder of ``annotations`` that another split names, too, may be of its images; if these are missing,
    nothing is known about the files.
    """
    split_spec = spec.splits[split]
    assert isinstance(split_spec, FilesSplit)
    suffix = split_spec.label_format.suffix
    used = set(labels.existing)
    suffixes = image_suffixes(spec.pixels)
    named = images.stamps.keys() | {finding.where for finding in images.findings}  # with broken links
    orphans: list[str] = []  # absolute paths
    for folder, image_folders in _with_folders_below(split_spec, labels.folders, folders).items():
        prefix = folders.prefix(folder)
        files = [
            name
            for name, entry in folders.entries(folder).items()
            if name[-len(suffix) :].lower() == suffix and prefix + name not in used and not entry.is_dir()
        ]
        if files:
            others = {stem for f in image_folders for stem in _other_images(f, named, suffixes, folders)}
            orphans += [f"{folder}/{name}" for name in files if loose(name[: -len(suffix)]) not in others]
    if orphans and split_spec.annotations is not None:
        labels_of_others = _labels_of_other_splits(spec, split, folders)
        if labels_of_others is None:
            return []
        orphans = [path for path in orphans if path not in labels_of_others]
    findings = [_orphan(path, split_spec, folders) for path in sorted(set(orphans))]
    return [finding for finding in findings if finding is not None]


def _other_images(folder: str, named: Set[str], suffixes: frozenset[str], folders: Folders) -> set[str]:
    """Returns the loose stems of images in a folder that are not ``named``. The folder need not exist."""
    if not os.path.isdir(folder):
        return set()
    prefix = folders.prefix(folder)
    names = [name for name in folders.entries(folder) if prefix + name not in named]
    return {loose(stem) for stem, suffix in map(os.path.splitext, names) if suffix.lower() in suffixes}


def _with_folders_below(split: FilesSplit, label_folders: dict[str, set[str]], folders: Folders) -> dict[str, set[str]]:
    """Returns the label folders of a split, also those below them, where an image folder may be missing. Each has the
    folders that its images may be in."""
    result = {folder: set(image_folders) for folder, image_folders in label_folders.items()}
    for entry in map(str, split.images):
        if not os.path.isdir(entry):
            continue
        top, _ = place_of_labels(entry, "", split.annotations, folders)
        if os.path.isdir(top):
            for folder in folders.walk(top):
                below = os.path.relpath(folder, top)
                result.setdefault(folder, set()).add(os.path.normpath(os.path.join(entry, below)))
    return result


def _labels_of_other_splits(spec: DatasetSpec, split: str, folders: Folders) -> set[str] | None:
    """Returns the label files (absolute paths) of the other splits in the same folder of annotations. Returns None if
    one of these has no images here."""
    annotations = spec.splits[split].paths[-1]
    paths: set[str] = set()
    for name, other in (spec.splits | spec.left_out).items():
        if name == split or not isinstance(other, FilesSplit) or other.annotations is None:
            continue
        if not (other.annotations.is_relative_to(annotations) or annotations.is_relative_to(other.annotations)):
            continue
        images = find_other_images(spec, name, folders)
        if images is None:
            return None
        labels = find_labels(other, images, sorted(images.stamps), folders)
        paths.update(path_of(label, folders.root) for label in labels.existing)
    return paths


def _orphan(path: str, split: FilesSplit, folders: Folders) -> Finding | None:
    """Returns the finding about a label file without an image, None for a file without a row."""
    try:
        num_objects = split.label_format.num_objects(read_regular(path, MAX_BYTES))
    except OSError:  # what it contains is unknown
        num_objects = 1
    if not num_objects:
        return None
    folder, _, name = path.rpartition("/")
    text = f"no image of its name; {counted(num_objects, 'object')}"
    return Finding(folders.prefix(folder) + name, ORPHAN, text, lost_objects=num_objects)
