"""Finds the images of a .txt list.

Its rows are exact paths (`list_rows`) or, if none of them is, read as `relocated_lists` decides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.images.kinds import is_image
from data.labels.findings import BAD_IMAGE, BAD_LISTED, MISSING_IMAGE, Finding
from data.source.listing.list_rows import ImageList, Row
from data.source.listing.relocated_lists import RelocatedLists, ResolvedRows
from data.source.walk import NO_FILE, Folders, access_problem
from data.split_files import ImageFile
from utils.files.paths import relative_name


class ImageOfRow(NamedTuple):
    """An image that a row of a list names."""

    image: ImageFile
    row: Row
    location: str  # of the row
    repetition: str  # see `ResolvedRows.repeated`; "" if the row repeats none


@dataclass(frozen=True, slots=True)
class ImagesOfRows:
    """The images that the rows of a list name, and the problems of other rows."""

    images: list[ImageOfRow]  # in order
    missing: list[str]  # names in the rows whose images do not exist, as paths with /
    findings: list[Finding]
    notes: list[str]  # for the log
    warnings: list[str]  # for the log


def find_images_of_rows(image_list: ImageList, relocated_lists: RelocatedLists) -> ImagesOfRows:
    """Finds the images of a list. Raises UserError as `RelocatedLists.resolve` does."""
    resolved = ResolvedRows(image_list.exact_paths)
    if image_list.is_relocated:
        resolved = relocated_lists.resolve(image_list)
    has_suffixes = any(is_image(row.text, image_list.suffixes) for row in image_list.rows)
    images: list[ImageOfRow] = []
    missing: list[str] = []
    findings: list[Finding] = []
    num_not_found = 0
    for row, paths in zip(image_list.rows, resolved.paths_of_rows, strict=True):
        location = image_list.location(row)
        if row.line in resolved.missing:
            missing.append(row.name)
            findings.append(Finding(location, MISSING_IMAGE, resolved.missing[row.line], lost_images=1))
        elif len(paths) == 1 and image_list.folders.is_file(paths[0]):
            image = _image_at(paths[0], image_list.folders)
            images.append(ImageOfRow(image, row, location, resolved.repeated.get(row.line, "")))
        elif len(paths) == 1 and not image_list.folders.exists(paths[0]):
            missing.append(row.name)
            reason = f"{row.text}: {access_problem(paths[0])}"
            findings.append(Finding(location, MISSING_IMAGE, reason, lost_images=1))
        elif not paths and (is_image(row.text, image_list.suffixes) or not has_suffixes):
            missing.append(row.name)
            num_not_found += 1
            findings.append(_missing(row, location))
        else:
            findings.append(_unusable(row, location, paths, image_list))
    warnings = resolved.warnings
    if not image_list.is_relocated and num_not_found > len(images):
        warnings = [_few_exact_rows_warning(image_list, images)]
    return ImagesOfRows(images, missing, findings, resolved.notes, warnings)


def _image_at(path: str, folders: Folders) -> ImageFile:
    folder, name = os.path.split(path)
    return ImageFile(folders.name_in(folder) + name, name, folders.stamp(path))


def _missing(row: Row, location: str) -> Finding:
    reason = "not found"
    if row.parts[-1].startswith("."):
        reason += ", because names that begin with a dot are hidden; rename the image"
    return Finding(location, MISSING_IMAGE, f"{row.text} {reason}", lost_images=1)


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


def _few_exact_rows_warning(image_list: ImageList, images: Sequence[ImageOfRow]) -> str:
    count = f"only {len(images):,} of {len(image_list.rows):,} rows are paths of images as written"
    if images:
        count += f", first {images[0].location}: {images[0].row.text}"
    return f"{image_list.file}: {count}; the others are not looked up in other folders: write all rows as such paths"
