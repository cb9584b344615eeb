"""Reads a .txt list of images.

Its rows are exact (`list_rows`) or, if none of them is, read as `relocated_lists` decides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.image_io.file_kinds import is_image
from data.labels.findings import BAD_IMAGE, BAD_LISTED, MISSING_IMAGE, Finding
from data.source.listing.list_rows import ImageList, Row
from data.source.listing.relocated_lists import RelocatedLists, SharedImages
from data.source.walk import Folders, none_if_missing
from data.split_files import ImageFile
from utils.files.paths import relative_name

NO_FILE = "a pipe or device, not a file"


class NamedImage(NamedTuple):
    """An image, and the row of a list that names it."""

    location: str
    image: ImageFile
    row: Row


@dataclass(frozen=True, slots=True)
class NamedImages:
    """The images that the rows of a list name, and the problems of other rows."""

    images: list[NamedImage]  # in order
    missing: list[str]  # names in the rows whose images do not exist, as paths with /
    findings: list[Finding]
    notes: list[str]  # for the log
    warnings: list[str]  # for the log


def find_named_images(image_list: ImageList, split: str, relocated_lists: RelocatedLists) -> NamedImages:
    """Finds the images of a list of ``split``. If a relocated row repeats an image but contradicts the first such row,
    it means another image, which is missing. Raises UserError as `RelocatedLists.relocate` does."""
    paths_of_rows = image_list.exact_paths
    notes: list[str] = []
    warnings: list[str] = []
    if image_list.rows and not image_list.has_exact_row:
        paths_of_rows, shared = relocated_lists.relocate(image_list, split)
        notes = _reader_notes(image_list, paths_of_rows)
        if shared:
            warnings.append(_shared_images_warning(image_list, shared))
    has_suffixes = any(is_image(row.text, image_list.suffixes) for row in image_list.rows)
    list_name = relative_name(image_list.file, image_list.root)
    images: list[NamedImage] = []
    first_of_image: dict[str, NamedImage] = {}  # by name
    missing: list[str] = []
    findings: list[Finding] = []
    for row, paths in zip(image_list.rows, paths_of_rows, strict=True):
        location = f"{list_name}:{row.line}"
        image = _image_at(paths[0], image_list.folders) if len(paths) == 1 else None
        if image is not None:
            named = NamedImage(location, image, row)
            first = first_of_image.setdefault(image.name, named)
            if image_list.has_exact_row or not row.contradicts(first.row):
                images.append(named)
            else:
                missing.append(row.name)
                findings.append(_image_of_another_row(named, first))
        elif not paths and (is_image(row.text, image_list.suffixes) or not has_suffixes):
            missing.append(row.name)
            findings.append(_missing(row, location))
        else:
            findings.append(_unusable(row, location, paths, image_list))
    if image_list.has_exact_row and len(missing) > len(images):
        warnings.append(_few_exact_rows_warning(image_list, images))
    return NamedImages(images, missing, findings, notes, warnings)


def _image_at(path: str, folders: Folders) -> ImageFile | None:
    """Returns the image at a path, or None if it is not a regular file."""
    folder, name = os.path.split(path)
    if not none_if_missing(folders.entries(folder)[name].is_file):
        return None
    return ImageFile(folders.name_in(folder) + name, name, folders.stamp(path))


def _missing(row: Row, location: str) -> Finding:
    reason = "not found"
    if row.parts[-1].startswith("."):
        reason += ", because names that begin with a dot are hidden; rename the image"
    return Finding(location, MISSING_IMAGE, f"{row.text} {reason}", lost_images=1)


def _image_of_another_row(named: NamedImage, first: NamedImage) -> Finding:
    """Returns the finding about a row whose image is missing: the image ``named`` is that of the ``first`` row."""
    text = f"{named.row.text} not found; {named.image.name} is read for {first.row.text} ({first.location})"
    return Finding(named.location, MISSING_IMAGE, text, lost_images=1)


def _unusable(row: Row, location: str, paths: list[str], image_list: ImageList) -> Finding:
    """Returns the finding about a row that is not the path of an image, if ``paths`` is empty, that names several files
    by their stem, or one that is not a regular file."""
    if not paths:
        return Finding(location, BAD_LISTED, f"{row.text[:100]!r} is not the path of an image", lost_images=1)
    if len(paths) > 1:
        names = ", ".join(relative_name(path, image_list.root) for path in paths)
        return Finding(location, BAD_LISTED, f"{row.text[:100]!r} may be any of {names}", lost_images=1)
    reason = "a folder, not a file" if os.path.isdir(paths[0]) else NO_FILE
    return Finding(location, BAD_IMAGE, f"{row.text}: {reason}", lost_images=1, consequence="left out")


def _reader_notes(image_list: ImageList, paths_of_rows: Sequence[list[str]]) -> list[str]:
    """Returns how the rows are read, by the example of the first that names an image, or nothing if none does."""
    for row, paths in zip(image_list.rows, paths_of_rows, strict=True):
        if len(paths) == 1:
            example = f"line {row.line}: {row.text} is {relative_name(paths[0], image_list.root)}"
            return [f"{image_list.file}: no row names an image as written; rows are read like {example}"]
    return []


def _few_exact_rows_warning(image_list: ImageList, images: Sequence[NamedImage]) -> str:
    count = f"only {len(images):,} of {len(image_list.rows):,} rows are paths of images as written"
    if images:
        count += f", first {images[0].location}: {images[0].row.text}"
    return f"{image_list.file}: {count}; the others are not looked up in other folders: write all rows as such paths"


def _shared_images_warning(image_list: ImageList, shared: Sequence[SharedImages]) -> str:
    counts = ", ".join(f"{len(other.paths):,} in {other.file} of '{other.split}'" for other in shared)
    first = relative_name(shared[0].paths[0], image_list.root)
    advice = f"if other images of these names are meant, give paths of images relative to {image_list.root}"
    problem = f"some of its images (first: {first}) are also in other lists, whose rows could mean the same files"
    return f"{image_list.file}: {problem}: {counts}; {advice}"


def repeated_rows_warning(image_list: ImageList, repeated: Sequence[tuple[NamedImage, NamedImage]]) -> str:
    """Returns a warning about rows of a list that are read as images of other lists of the split, although their
    folders differ. ``repeated``: the row of another list and that of this one."""
    first, second = repeated[0]
    count = f"{len(repeated):,} of {len(image_list.rows):,} rows are read as images that other lists of the split name"
    example = f"{second.row.text} ({second.location}) and {first.row.text} ({first.location}) are {first.image.name}"
    advice = f"if different images are meant, give paths of images relative to {image_list.root}"
    return f"{image_list.file}: {count} by other folders (first: {example}); each is used once; {advice}"
