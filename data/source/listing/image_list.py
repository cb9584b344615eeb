"""Reads .txt lists of images, as written by Darknet, CVAT and Pascal VOC, with one path per row."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from data.labels.findings import BAD_IMAGE, BAD_LISTED, MISSING_IMAGE, Finding
from data.source.missing_data import labels_without_images
from data.source.walk import Folders, none_if_missing, walk
from data.split_files import ImageFile
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.files.safe_io import read_text
from utils.logger import get_logger

MAX_LIST_BYTES = 1 << 31
NO_FILE = "a pipe or device, not a file"
_MAX_TRIED_ROWS = 10  # rows tried to locate the images of a list that was written for another folder


class NamedImage(NamedTuple):
    """An image, and the row of a list that names it."""

    location: str
    image: ImageFile


@dataclass(frozen=True, slots=True)
class ImageList:
    """The images that the rows of a list name, and the problems of other rows."""

    images: list[NamedImage]  # in order
    missing: list[str]  # names in the rows whose images do not exist, as paths with /
    findings: list[Finding]


class _Row(NamedTuple):
    line: int
    text: str


class _RowReader(Protocol):
    """Resolves the rows of a list to image paths."""

    def names_image(self, row: str) -> bool:
        """Returns whether a row looks like the path of an image."""

    def path(self, row: str) -> str | None:
        """Returns the absolute path of the image, or None if it does not exist."""


def read_image_list(
    file: Path, folders: Folders, suffixes: frozenset[str], other_entries: Iterable[Path] = ()
) -> ImageList:
    """Reads a list. If no row names an image as written, determines the folder that the list was written for. Raises
    UserError if the first rows still match no image, or if one of them matches several. ``other_entries``: folders and
    lists of other splits."""
    rows = _rows(read_text(file, max_bytes=MAX_LIST_BYTES))
    reader: _RowReader = _RowsAsWritten(file.parent, folders, suffixes)
    if rows and all(reader.path(row.text) is None for row in rows):
        reader = _reader_for_another_folder(rows, file, folders, suffixes, _folders_of_others(other_entries, file))
    images: list[NamedImage] = []
    missing: list[str] = []
    findings: list[Finding] = []
    for row in rows:
        location = f"{relative_name(file, folders.root)}:{row.line}"
        image = _read_row(row, location, reader, folders)
        if isinstance(image, ImageFile):
            images.append(NamedImage(location, image))
            continue
        findings.append(image)
        if image.kind == MISSING_IMAGE:
            missing.append(_name_in(row))
    return ImageList(images, missing, findings)


def listed_names(file: Path) -> list[str]:
    """Returns the names in the rows of a list, as paths with /, whether or not their images exist. Raises UserError if
    the list cannot be read."""
    return [_name_in(row) for row in _rows(read_text(file, max_bytes=MAX_LIST_BYTES))]


def is_image(name: str, suffixes: frozenset[str]) -> bool:
    """Returns whether a file has one of the ``suffixes`` of supported images. For any image, see `is_image_name`."""
    return os.path.splitext(name)[1].lower() in suffixes


def is_row(path: str) -> bool:
    """Returns whether a list, which is UTF-8, can contain ``path``: one with a line break or outer spaces would be read
    differently."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return [row.text for row in _rows(path)] == [path]


def _rows(text: str) -> list[_Row]:
    rows = [_Row(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [row for row in rows if row.text]


def _read_row(row: _Row, location: str, reader: _RowReader, folders: Folders) -> ImageFile | Finding:
    """Returns the image of a row, or a finding about the row."""
    if not reader.names_image(row.text):
        return Finding(location, BAD_LISTED, f"{row.text[:100]!r} is not the path of an image", lost_images=1)
    path = reader.path(row.text)
    if path is None:
        reason = "not found"
        if _parts(row.text)[-1].startswith("."):
            reason += ", because names that begin with a dot are hidden; rename the image"
        return Finding(location, MISSING_IMAGE, f"{row.text} {reason}", lost_images=1)
    parent, name = os.path.split(path)
    entry = folders.entries(parent)[name]
    if not none_if_missing(entry.is_file):
        reason = "a folder, not a file" if none_if_missing(entry.is_dir) else NO_FILE
        return Finding(location, BAD_IMAGE, f"{row.text}: {reason}", lost_images=1, consequence="left out")
    return ImageFile(folders.name_in(parent) + name, name, folders.stamp(path))


class _RowsAsWritten:
    """Reads rows as absolute or relative paths. Rows that begin with ``./`` are relative to the list's folder or else
    to the data set's folder; other rows are relative to the data set's folder or else to the list's folder."""

    def __init__(self, list_folder: Path, folders: Folders, suffixes: frozenset[str]) -> None:
        self._list_folder = list_folder
        self._folders = folders
        self._suffixes = suffixes

    def names_image(self, row: str) -> bool:
        return is_image(row, self._suffixes)

    def path(self, row: str) -> str | None:
        if not self.names_image(row):
            return None
        bases = [self._folders.root, self._list_folder]
        if row.startswith("./"):
            bases.reverse()
        paths = [self._folders.normal(os.path.join(base, row)) for base in bases]
        for path in paths:
            if self._folders.exists(path):
                return path
        for path in paths:
            alike = self._folders.case_insensitive_match(path)
            if alike is not None:
                return alike
        return None


class _RelocatedRows:
    """Reads rows, with or without suffix, as paths in ``folder`` after dropping their first ``num_dropped`` folders,
    which belong to another location."""

    def __init__(self, folder: Path, num_dropped: int, folders: Folders, suffixes: frozenset[str]) -> None:
        self._folder = folder
        self._num_dropped = num_dropped
        self._folders = folders
        self._suffixes = suffixes

    def names_image(self, row: str) -> bool:
        return True

    def path(self, row: str) -> str | None:
        parts = _parts(row)[self._num_dropped :]
        if not parts:  # fewer folders than the row that determined ``num_dropped``
            return None
        path = os.path.join(self._folder, *parts)
        if is_image(row, self._suffixes):
            return path if self._folders.exists(path) else None
        endings = (*self._suffixes, *map(str.upper, self._suffixes))
        existing = [path + ending for ending in endings if self._folders.exists(path + ending)]
        return existing[0] if len(existing) == 1 else None


def _reader_for_another_folder(
    rows: list[_Row], file: Path, folders: Folders, suffixes: frozenset[str], folders_of_others: Sequence[Path]
) -> _RelocatedRows:
    """Returns a reader for a list whose rows name no image as written: they have Windows separators, are for another
    folder (CVAT's ``data/obj_train_data/a.jpg``, absolute paths of another machine), or lack suffixes (VOC's
    ``000012``).

    The first row whose end is the path of exactly one image in the data set's folder, or in the list's, decides for
    all. A complete row may also be the end of a path in another folder, except in ``folders_of_others``. Images
    elsewhere only have the same names: they may have other labels. Raises UserError if no row matches, or if one
    matches several images.
    """
    root = folders.root
    tried_rows = rows[:_MAX_TRIED_ROWS]
    candidates = _images_called_like(tried_rows, file, root, suffixes)
    bases = {file.parent, root, *root.parents}  # the last for rows that also have the name of the data set's folder
    elsewhere = ""
    for row in tried_rows:
        num_dropped, images = _images_with_longest_end(row, candidates, suffixes)
        num_parts = len(_parts(row.text)) - num_dropped
        base_of = {image: Path(image).parents[num_parts - 1] for image in images}
        matches = [image for image in images if base_of[image] in bases]
        if not matches and num_dropped == 0:
            matches = [image for image in images if not _is_in(image, folders_of_others)]
        if len(matches) > 1:
            raise _several_images(row, sorted(matches), file, root)
        if matches:
            message = "%s: no row names an image as written; rows are read like line %d: %s is %s"
            get_logger().info(message, file, row.line, row.text, relative_name(Path(matches[0]), root))
            return _RelocatedRows(base_of[matches[0]], num_dropped, folders, suffixes)
        if images and not elsewhere:
            elsewhere = relative_name(Path(min(images)), root)
    first = rows[0]
    message = f"{file}:{first.line}: {first.text[:200]!r} is not an image, and neither is any other row"
    if elsewhere:
        message += f"; {elsewhere} has the same name, but is in another folder or split"
    raise UserError(message + (labels_without_images(root) or f"; give paths of images relative to {root}"))


def _folders_of_others(entries: Iterable[Path], file: Path) -> list[Path]:
    """Returns the folders of other splits, and those that contain their lists, except folders that also contain the
    list ``file``, such as VOC's ImageSets. ``entries``: folders and lists."""
    entry_folders = dict.fromkeys(entry if entry.is_dir() else entry.parent for entry in entries)
    return [folder for folder in entry_folders if folder not in file.parents]


def _is_in(image: str, searched: Iterable[Path]) -> bool:
    return any(folder in Path(image).parents for folder in searched)


def _images_with_longest_end(row: _Row, images: list[str], suffixes: frozenset[str]) -> tuple[int, list[str]]:
    """Returns how many leading parts of a row must be dropped, at least, so that any of the ``images`` end in the rest,
    and which do."""
    parts = _parts(row.text)
    for num_dropped in range(len(parts)):
        matches = _paths_ending_in(parts[num_dropped:], images, has_suffix=is_image(row.text, suffixes))
        if matches:
            return num_dropped, matches
    return len(parts), []


def _paths_ending_in(tail: list[str], paths: list[str], *, has_suffix: bool) -> list[str]:
    """Returns the ``paths`` that end in the parts ``tail``, compared without suffixes unless ``has_suffix``."""
    ending = os.sep + os.path.join(*tail)
    if has_suffix:
        return [path for path in paths if path.endswith(ending)]
    return [path for path in paths if os.path.splitext(path)[0].endswith(ending)]


def _several_images(row: _Row, images: list[str], file: Path, root: Path) -> UserError:
    """Returns the error about a row that may name any of several ``images``."""
    shown = images if len(images) <= 2 else [*images[:2], "..."]
    return UserError(
        f"{file}:{row.line}: {len(images)} images fit {row.text[:200]!r}: {', '.join(shown)}; name images by "
        f"their paths relative to {root}"
    )


def _images_called_like(rows: list[_Row], file: Path, root: Path, suffixes: frozenset[str]) -> list[str]:
    """Returns the paths of the images in the data set that have the names of ``rows``, with or without suffix."""
    names = {_parts(row.text)[-1] for row in rows}
    voc_images = file.parent.parent.parent / "JPEGImages"  # next to ImageSets; masks elsewhere have the same names
    base = voc_images if voc_images.is_dir() else root
    if not base.is_dir():
        return []
    images = [entry for visit in walk(base) for entry in visit.entries if is_image(entry.name, suffixes)]
    return [entry.path for entry in images if entry.name in names or os.path.splitext(entry.name)[0] in names]


def _name_in(row: _Row) -> str:
    return "/".join(_parts(row.text))


def _parts(row: str) -> list[str]:
    return [part for part in row.replace("\\", "/").split("/") if part not in ("", ".", "..")] or [row]
