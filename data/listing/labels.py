"""Finds the label file of each image, in formats with one per image (rules D1 to D3), and label files without an image.

`data.labels.places` decides in which folder they are. In it, a name that differs only in case or Unicode composition
counts if it is the only one.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from data.dataset.spec import DatasetSpec, FilesSplit
from data.folders import Folders
from data.labels.findings import ORPHAN, Finding
from data.labels.label_format import MAX_BYTES, LabelFormat
from data.labels.places import complete_place, voc_places, yolo_places
from data.listing.images import SplitImages, folder_of, images_beside, images_of_other_splits
from utils.errors import UserError
from utils.files.paths import casefold_nfc, path_of
from utils.files.safe_io import read_regular
from utils.logger import get_logger
from utils.strings import counted


class LabelFiles(NamedTuple):
    """The label files of images. Names are relative to the data set's folder."""

    expected: dict[str, str]  # of each image: its label file, or where it would be
    used: set[str]  # existing files of one image, or of images of one folder with the same stem
    places: dict[str, str]  # folder of the label files (absolute), by the start of the images' names


def find_labels(spec: DatasetSpec, split: str, images: SplitImages, folders: Folders) -> LabelFiles:
    """Finds the label files of ``images``. Raises UserError if it is not known in which of several places they are, or
    which of several images a file is of."""
    source = spec.listed_splits[split]
    suffix = source.label_format.suffix
    names_in: dict[str, list[str]] = {}  # by the start of the names
    for name in images.stamps:
        names_in.setdefault(folder_of(name), []).append(name)
    files = LabelFiles({}, set(), {})
    image_of: dict[str, str] = {}  # an image of each label file
    for prefix, names in names_in.items():
        label_of = {name: name[len(prefix) :].rpartition(".")[0] + suffix for name in names}
        places = _places(images, prefix, spec, source, folders)
        found: dict[str, dict[str, str]] = {}  # existing label files by image, by place
        for place in places:
            if any(name[-len(suffix) :].lower() == suffix for name in _entries(place, folders)):
                existing = {name: folders.find(place, label) for name, label in label_of.items()}
                found[place] = {name: label for name, label in existing.items() if label is not None}
        try:
            place = _place_in_use(found, len(names), source.label_format, folders) or places[0]
        except UserError as error:
            raise UserError(f"{spec.source}: '{split}': {images.folders[prefix]}: {error}") from None
        files.places[prefix] = place
        start = folders.prefix(place)
        for name, label in label_of.items():
            existing_label = found.get(place, {}).get(name)
            files.expected[name] = start + (existing_label or label)
            if existing_label is not None:
                first = image_of.setdefault(start + existing_label, name)
                if folder_of(first) != prefix:
                    raise UserError(
                        f"{spec.source}: '{split}': {start + existing_label}: it is not known whether it is of {first} "
                        f"or of {name}; move the label files into folders like those of the images"
                    )
                files.used.add(start + existing_label)
    return files


def _places(images: SplitImages, prefix: str, spec: DatasetSpec, source: FilesSplit, folders: Folders) -> list[str]:
    """Returns the folders in which the label files of the images in a folder may be."""
    folder = images.folders[prefix]
    if source.annotations is None:
        return yolo_places(folder, folders, is_bounded=spec.is_folder)
    return voc_places(folder, str(source.annotations), images.entries.get(prefix, str(spec.root)), folders)


def _entries(folder: str, folders: Folders) -> dict[str, os.DirEntry]:
    return folders.entries(folder) if os.path.isdir(folder) else {}


def _place_in_use(
    found: dict[str, dict[str, str]], num_images: int, label_format: LabelFormat, folders: Folders
) -> str | None:
    """Returns the place of the label files of the images in a folder, None if there is none. Of several places, only
    those count in which a file has a row: captions of images, for example, are called like label files."""
    found = {place: labels for place, labels in found.items() if labels}
    if len(found) > 1:
        with_rows = [
            place
            for place, labels in found.items()
            if any(_num_objects(os.path.join(place, label), label_format) for label in labels.values())
        ]
        if with_rows:
            found = {place: found[place] for place in with_rows}
    chosen = complete_place({place: (len(labels), num_images) for place, labels in found.items()})
    for place, labels in found.items():
        if place != chosen:
            message = "%s has a label file for each image; not used: %s of the same names in %s"
            get_logger().info(message, chosen, counted(len(labels), "file"), place)
    return chosen


def _num_objects(file: str, label_format: LabelFormat) -> int:
    """Returns the number of rows of a label file; 1 if it cannot be read, since what it contains is unknown."""
    assert label_format.num_objects is not None, "formats with a file per image count its objects"
    try:
        return label_format.num_objects(read_regular(file, MAX_BYTES))
    except OSError:
        return 1


def find_orphans(
    spec: DatasetSpec, split: str, images: SplitImages, labels: LabelFiles, folders: Folders
) -> list[Finding]:
    """Returns a finding for each label file with a row, in the label folders of the split, that no image has.

    A file may be of an image beside those of this split, as with a list of a part of the images; then it is none. Files
    in a folder of ``annotations`` that another split names, too, may be of its images; if these are missing, nothing is
    known about the files.
    """
    source = spec.listed_splits[split]
    suffix = source.label_format.suffix
    if source.annotations is not None:
        tops = [str(source.annotations)]
    else:  # also label folders of missing image folders
        entries = [str(entry) for entry in source.images if os.path.isdir(entry)]
        places = [yolo_places(entry, folders, is_bounded=spec.is_folder) for entry in entries]
        tops = [next(filter(os.path.isdir, of_entry)) for of_entry in places]
    label_folders = {folder for top in tops for folder in folders.walk(top)} | set(labels.places.values())
    orphans = {
        folders.prefix(folder) + name
        for folder in label_folders
        for name, entry in _entries(folder, folders).items()
        if name[-len(suffix) :].lower() == suffix and not entry.is_dir()
    } - labels.used
    if orphans:
        with_image = _files_with_image(spec, split, images, labels, folders)
        if with_image is None:
            return []
        orphans = {name for name in orphans if casefold_nfc(name[: -len(suffix)]) not in with_image}
    findings: list[Finding] = []
    for name in sorted(orphans):
        num_objects = _num_objects(path_of(name, folders.root), source.label_format)
        if num_objects:
            text = f"no image of its name; {counted(num_objects, 'object')}"
            findings.append(Finding(ORPHAN, text, name, number=num_objects, lost_objects=num_objects))
    return findings


def _files_with_image(
    spec: DatasetSpec, split: str, images: SplitImages, labels: LabelFiles, folders: Folders
) -> set[str] | None:
    """Returns where, without suffix and in lower case, label files may be of other images than those of a split, or in
    another place than that in use. Returns None if another split that names the annotations has no images here."""
    source = spec.listed_splits[split]
    groups = [(images, source), (images_beside(images, spec, folders), source)]
    if source.annotations is not None:
        for other, other_images in images_of_other_splits(spec, split, folders):
            if other_images is None:
                return None
            groups.append((other_images, other))
    with_image: set[str] = set()
    for group, of_group in groups:
        starts: dict[str, list[str]] = {}  # of the names of label files, by that of the images'
        for name in group.stamps:
            prefix = folder_of(name)
            stem = name[len(prefix) :].rpartition(".")[0]
            if prefix not in starts:
                in_use = labels.places[prefix] if group is images else None
                places = _places(group, prefix, spec, of_group, folders)
                starts[prefix] = [casefold_nfc(folders.prefix(place)) for place in places if place != in_use]
            with_image.update(start + casefold_nfc(stem) for start in starts[prefix])
    return with_image
