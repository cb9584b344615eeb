"""Finds the label file of each image, in formats with one per image (rules D1 to D3), and label files without an image.

`data.labels.places` decides in which folder they are. In it, a name that differs only in case or Unicode composition
counts if it is the only one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.dataset.spec import DatasetSpec, FilesSplit
from data.folders import Folders
from data.labels.findings import ORPHAN, Finding
from data.labels.label_format import MAX_BYTES, LabelFormat
from data.labels.places import complete_place, voc_places, yolo_places
from data.listing.images import SplitImages, folder_of, images_beside, images_of_other_splits
from utils.errors import UserError
from utils.files.paths import path_of
from utils.files.safe_io import read_regular
from utils.strings import counted


class LabelFiles(NamedTuple):
    """The label files of images. Names are relative to the data set's folder."""

    expected: dict[str, str]  # of each image: its label file, or where it would be
    used: set[str]  # existing files of one image, or of images of one folder with the same stem
    matched: set[str]  # these, and the files of the images' names in places that do not count
    folders: set[str]  # folders of the label files (absolute)


def find_labels(spec: DatasetSpec, split: str, images: SplitImages, folders: Folders) -> LabelFiles:
    """Finds the label files of ``images``. Raises UserError if their location is ambiguous, or a file matches several
    images."""
    source = spec.listed_splits[split]
    suffix = source.label_format.suffix
    expected: dict[str, str] = {}
    image_of: dict[str, str] = {}  # an image of each label file in use
    matched: set[str] = set()
    label_folders: set[str] = set()
    for prefix, names, found in _matches(images, spec, source, folders):
        for labels in found.values():
            matched.update(labels.values())
        try:
            place = _place_in_use(found, len(names), source.label_format, spec.root)
        except UserError as error:
            raise UserError(f"{spec.source}: '{split}': {images.folders[prefix]}: {error}") from None
        label_folders.add(place)
        for name in names:
            label = found[place].get(name) or folders.prefix(place) + _label_name(name, suffix)
            expected[name] = label
            if name in found[place]:
                first = image_of.setdefault(label, name)
                if folder_of(first) != prefix:
                    reason = f"matches {first} and {name}"
                    remedy = "move the label files into folders like those of the images"
                    raise UserError(f"{spec.source}: '{split}': {label}: {reason}; {remedy}")
    return LabelFiles(expected, set(image_of), matched, label_folders)


def _matches(
    images: SplitImages, spec: DatasetSpec, source: FilesSplit, folders: Folders
) -> Iterator[tuple[str, list[str], dict[str, dict[str, str]]]]:
    """Yields, for each folder of images, the start of their names, the names, and the label files that are called like
    them: by place in which they may be, by image."""
    suffix = source.label_format.suffix
    names_in: dict[str, list[str]] = {}  # by their start
    for name in images.stamps:
        names_in.setdefault(folder_of(name), []).append(name)
    for prefix, names in names_in.items():
        folder = images.folders[prefix]
        if source.annotations is None:
            places = yolo_places(folder, folders, is_bounded=spec.is_folder)
        else:
            entry = images.entries.get(prefix, str(spec.root))
            places = voc_places(folder, str(source.annotations), entry, folders)
        found: dict[str, dict[str, str]] = {place: {} for place in places}
        for place in places:
            if any(_label_names(place, suffix, folders)):
                start = folders.prefix(place)
                labels = {name: folders.find(place, _label_name(name, suffix)) for name in names}
                found[place] = {name: start + label for name, label in labels.items() if label is not None}
        yield prefix, names, found


def _label_name(image: str, suffix: str) -> str:
    """Returns the name of an image's label file, without its folder."""
    return image.rpartition("/")[2].rpartition(".")[0] + suffix


def _label_names(folder: str, suffix: str, folders: Folders) -> Iterator[str]:
    """Yields the names of the label files in a folder, which need not exist."""
    names = folders.entries(folder) if os.path.isdir(folder) else ()
    return (name for name in names if name[-len(suffix) :].lower() == suffix)


def _place_in_use(found: dict[str, dict[str, str]], num_images: int, label_format: LabelFormat, root: Path) -> str:
    """Returns the place of the label files of the images in a folder, the first if there are none. Of several places,
    only those count in which a file has a row: captions of images, for example, are called like label files."""
    labeled = [place for place, labels in found.items() if labels]
    if len(labeled) > 1:
        with_rows = [
            place
            for place in labeled
            if any(_num_objects(label, root, label_format) for label in found[place].values())
        ]
        labeled = with_rows or labeled
    if not labeled:
        return next(iter(found))
    return complete_place({place: (len(found[place]), num_images) for place in labeled})


def _num_objects(name: str, root: Path, label_format: LabelFormat) -> int:
    """Returns the number of rows of a label file; 1 if it cannot be read, since what it contains is unknown."""
    assert label_format.num_objects is not None, "formats with a file per image count its objects"
    try:
        return label_format.num_objects(read_regular(path_of(name, root), MAX_BYTES))
    except IsADirectoryError:
        return 0
    except OSError:
        return 1


def find_orphans(
    spec: DatasetSpec, split: str, images: SplitImages, labels: LabelFiles, folders: Folders
) -> list[Finding]:
    """Returns a finding for each label file with a row, in the label folders of the split, that no image has (rule D2).

    Images that have one may also be beside those of this split, as with a list of a part of the images, or in another
    split that names the folder of ``annotations``. If the images of such a split are missing, nothing is known about
    the files.
    """
    source = spec.listed_splits[split]
    if source.annotations is not None:
        tops = [str(source.annotations)]
    else:  # also label folders of missing image folders
        entries = [str(entry) for entry in source.images if os.path.isdir(entry)]
        places = [yolo_places(entry, folders, is_bounded=spec.is_folder) for entry in entries]
        tops = [next(filter(os.path.isdir, of_entry)) for of_entry in places]
    label_folders = {folder for top in tops for folder in folders.walk(top)} | labels.folders
    orphans = {
        folders.prefix(folder) + name
        for folder in label_folders
        for name in _label_names(folder, source.label_format.suffix, folders)
    } - labels.matched
    if not orphans:
        return []
    others = [(source, images_beside(images, spec, folders)), *images_of_other_splits(spec, split, folders)]
    for other, other_images in others:
        if other_images is None:
            return []
        for _, _, found in _matches(other_images, spec, other, folders):
            for matched in found.values():
                orphans.difference_update(matched.values())
    findings: list[Finding] = []
    for name in sorted(orphans):
        num_objects = _num_objects(name, spec.root, source.label_format)
        if num_objects:
            text = f"no image of its name; {counted(num_objects, 'object')}"
            findings.append(Finding(ORPHAN, text, name, number=num_objects, lost_objects=num_objects))
    return findings
