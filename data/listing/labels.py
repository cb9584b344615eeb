"""Finds the label file of each image, in formats with one per image (rules D1 to D3), and label files without an image.

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
from pathlib import Path
from typing import NamedTuple

from data.dataset.spec import DatasetSpec, FilesSplit
from data.labels.findings import ORPHAN, Finding
from data.labels.label_format import MAX_BYTES
from data.listing.folders import Folders
from data.listing.images import SplitImages, images_beside, images_of_other_splits
from utils.files.paths import casefold_nfc, path_of
from utils.files.safe_io import read_regular
from utils.strings import counted


class LabelFiles(NamedTuple):
    """The label files of images. Names are relative to the data set's folder."""

    expected: dict[str, str]  # of each image: its label file, or where it would be
    used: set[str]  # existing files of one image, or of images of one folder with the same stem
    claimed: set[str]  # existing files that are named like an image, even if it is not known of which one they are


def find_labels(images: SplitImages, split: FilesSplit, folders: Folders) -> LabelFiles:
    """Finds the label files of ``images``."""
    names_in: dict[str, list[str]] = {}  # by the start of the names
    for name in images.stamps:
        names_in.setdefault(name[: name.rfind("/") + 1], []).append(name)
    expected: dict[str, str] = {}
    claims: dict[str, list[tuple[int, str, str]]] = {}  # of label files: folders dropped, start of the name, image
    for prefix, names in names_in.items():
        expected_folder, places = places_of_labels(images.folders[prefix], split.annotations, folders)
        expected_prefix = folders.prefix(expected_folder)
        for name in names:
            label = name[len(prefix) :].rpartition(".")[0] + split.label_format.suffix
            expected[name] = expected_prefix + label
            for num_dropped, place in places:
                existing = folders.find(place, label)
                if existing is not None:
                    claims.setdefault(folders.prefix(place) + existing, []).append((num_dropped, prefix, name))
                    break
    used: set[str] = set()
    for label, of_label in claims.items():
        if len(of_label) > 1:
            fewest = min(of_label)[0]
            of_label = [claim for claim in of_label if claim[0] == fewest]
            if len({prefix for _, prefix, _ in of_label}) > 1:  # it is not known of which folder's image it is
                continue
        used.add(label)
        for _, _, name in of_label:
            expected[name] = label
    return LabelFiles(expected, used, set(claims))


def places_of_labels(
    image_folder: str, annotations: Path | None, folders: Folders
) -> tuple[str, list[tuple[int, str]]]:
    """Returns the folder where the label files of the images in ``image_folder`` are expected; and the existing ones,
    the first of which with a file of the name counts, with the number of leading folders that each drops."""
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
    spec: DatasetSpec, split: str, images: SplitImages, labels: LabelFiles, folders: Folders
) -> list[Finding]:
    """Returns a finding for each label file with a row, in the label folders of the split, that no image has.

    A file may be of an image beside those of this split, as with a list of a part of the images; then it is none. Files
    in a folder of ``annotations`` that another split names, too, may be of its images; if these are missing, nothing is
    known about the files.
    """
    source = spec.listed_splits[split]
    if source.annotations is not None:
        label_folders = set(folders.walk(str(source.annotations)))
    else:  # also those of missing image folders
        tops = [str(entry) for entry in source.images if os.path.isdir(entry)]
        label_folders = {place for top in tops for _, place in places_of_labels(top, None, folders)[1]}
        label_folders = {folder for top in label_folders for folder in folders.walk(top)}
        for folder in images.folders.values():
            label_folders.update(place for _, place in places_of_labels(folder, None, folders)[1])
    suffix = source.label_format.suffix
    count_objects = source.label_format.num_objects
    assert count_objects is not None, "formats with a file per image count its objects"
    orphans = {
        folders.prefix(folder) + name
        for folder in label_folders
        for name, entry in folders.entries(folder).items()
        if name[-len(suffix) :].lower() == suffix and not entry.is_dir()
    } - labels.used
    if orphans:
        orphans -= find_labels(images_beside(images, spec, folders), source, folders).claimed
    if orphans and source.annotations is not None:
        for other, other_images in images_of_other_splits(spec, split, folders):
            if other_images is None:
                return []
            orphans -= find_labels(other_images, other, folders).claimed
    findings: list[Finding] = []
    for name in sorted(orphans):
        try:
            num_objects = count_objects(read_regular(path_of(name, folders.root), MAX_BYTES))
        except OSError:  # what it contains is unknown
            num_objects = 1
        if num_objects:
            text = f"no image of its name; {counted(num_objects, 'object')}"
            findings.append(Finding(name, ORPHAN, text, number=num_objects, lost_objects=num_objects))
    return findings
