"""Reads .txt lists of images, as written by Darknet, CVAT and Pascal VOC (one path per row), and resolves exact rows:
paths relative to the data set's folder or the list's, or absolute ones.

Exact rows are read as written or, if there is no such image, with Windows separators. Those that begin with ``./`` are
relative to the list's folder or else to the data set's folder; others are relative to the data set's folder or else to
the list's folder. Rows without a suffix name images by their stems, first those in VOC's JPEGImages, of which previews
and masks may have the stems.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from data.images.kinds import image_suffixes, is_image
from data.source.dataset_spec import DatasetSpec
from data.source.walk import Folders, false_if_denied
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.files.safe_io import read_text

_MAX_BYTES = 1 << 31


class Row(NamedTuple):
    """A row of a list that is not blank."""

    line: int
    text: str  # without outer spaces; null characters are replaced

    @property
    def parts(self) -> list[str]:
        """The folders and the file name, between separators of any system."""
        parts = self.text.replace("\\", "/").split("/")
        return [part for part in parts if part not in ("", ".", "..")] or [self.text]

    @property
    def name(self) -> str:
        """The path, with /."""
        return "/".join(self.parts)

    @property
    def stem(self) -> str:
        return os.path.splitext(self.parts[-1])[0]

    def contradicts(self, other: Row) -> bool:
        """Returns whether this row and another one of the same file name must mean different images: the folders of
        neither row are the last ones of the other, as in ``a/images/0.jpg`` and ``b/images/0.jpg``."""
        pairs = zip(reversed(self.parts[:-1]), reversed(other.parts[:-1]), strict=False)
        return any(first != second for first, second in pairs)


@dataclass(frozen=True)
class ImageList:
    """A list, and where its images are looked up."""

    file: Path
    rows: list[Row]
    folders: Folders
    suffixes: frozenset[str]  # of images
    next_to_labels: bool  # whether the format expects label folders next to those of the images

    @property
    def root(self) -> Path:
        """The data set's folder."""
        return self.folders.root

    @cached_property
    def voc_image_folder(self) -> Path | None:
        """The folder of the images that a list in VOC's ``ImageSets/Main``, or in a folder placed like it, names by
        their stems. None if that would lead out of the data set that the list is in: to the images of another one."""
        sets = self.file.parent.parent
        folder = sets.parent / "JPEGImages"
        leads_out = self.file.is_relative_to(self.root) and not folder.is_relative_to(self.root)
        return None if leads_out and sets.name != "ImageSets" else folder

    @cached_property
    def exact_paths(self) -> list[list[str]]:
        """For each row, the path (absolute) of the image that it names, or those of several that have the stem."""
        return [self._exact_paths_of(row) for row in self.rows]

    @cached_property
    def is_relocated(self) -> bool:
        """Whether there are rows, and none names an image exactly, see `relocated_lists`."""
        return bool(self.rows) and not any(len(paths) == 1 for paths in self.exact_paths)

    @cached_property
    def _name(self) -> str:
        return relative_name(self.file, self.root)

    def location(self, row: Row) -> str:
        """Returns the list and the line of a row, for messages."""
        return f"{self._name}:{row.line}"

    def row_of_image(self, paths_of_rows: Sequence[Sequence[str]]) -> dict[str, Row]:
        """Returns the first row of each image, by its `Folders.real_image`. A row of several images has none.

        ``paths_of_rows``: for each row, the paths of the images that it may name.
        """
        row_of_image: dict[str, Row] = {}
        for row, paths in zip(self.rows, paths_of_rows, strict=True):
            if len(paths) == 1:
                row_of_image.setdefault(self.folders.real_image(paths[0]), row)
        return row_of_image

    def normal(self, path: str) -> str:
        """Returns the `Folders.normal` path of an image."""
        return self.folders.normal(path, next_to_labels=self.next_to_labels)

    def _exact_paths_of(self, row: Row) -> list[str]:
        paths = self._images_at(row.text)
        if not paths and "\\" in row.text:
            paths = self._images_at(row.text.replace("\\", "/"))
        return paths

    @cached_property
    def _bases(self) -> tuple[str, str]:
        """The folders to which rows are relative, in order. Computed once, because lists may have millions of rows."""
        return str(self.root), str(self.file.parent)

    def _images_at(self, path: str) -> list[str]:
        bases: tuple[str, ...] = self._bases[::-1] if path.startswith("./") else self._bases
        has_suffix = is_image(path, self.suffixes)
        if not has_suffix and self.voc_image_folder is not None:
            bases = (str(self.voc_image_folder), *bases)
        paths = [self.normal(os.path.join(base, path)) for base in bases]
        if not has_suffix:
            of_stem = (self.folders.files_of_stem(path, self.suffixes) for path in paths)
            return next(filter(None, of_stem), [])
        for path in paths:
            if self.folders.exists(path):
                return [path]
        for path in paths:
            alike = self.folders.case_insensitive_match(path)
            if alike is not None:
                return [alike]
        return []


class ImageLists:
    """Reads the lists of a data set, each once, for the listing of ``split``."""

    def __init__(self, spec: DatasetSpec, split: str, folders: Folders) -> None:
        self.folders = folders
        self._suffixes = image_suffixes(spec.pixels)
        self._next_to_labels = spec.listed_splits[split].annotations is None
        self._lists: dict[Path, ImageList] = {}

    def read(self, file: Path) -> ImageList:
        """Returns a list, which any split may name. Raises UserError if it cannot be read."""
        if file not in self._lists:
            rows = read_rows(file)
            self._lists[file] = ImageList(file, rows, self.folders, self._suffixes, self._next_to_labels)
        return self._lists[file]


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a list, whether or not their images exist. Raises UserError if it cannot be read."""
    return _rows(read_text(file, max_bytes=_MAX_BYTES))


def is_list(entry: Path) -> bool:
    """Returns whether an entry of a split is a list of images."""
    return entry.suffix.lower() == ".txt" and false_if_denied(entry.is_file)


def check_rows(paths: Iterable[str]) -> None:
    """Raises UserError for a path that a list to be written cannot contain."""
    for path in paths:
        if not _is_row(path):
            reason = "has a line break or outer spaces, or is not UTF-8, so it cannot be in a list of images"
            raise UserError(f"{path!r}: {reason}; rename it, and its label file")


def _is_row(path: str) -> bool:
    """Returns whether a list, which is UTF-8, can contain ``path``: one with a line break or outer spaces would be read
    differently."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return [row.text for row in _rows(path)] == [path]


def _rows(text: str) -> list[Row]:
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")  # no path contains it; found in files after a system crash
    rows = [Row(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [row for row in rows if row.text]
