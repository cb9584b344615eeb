"""Reads the rows of .txt lists of images, as written by Darknet, CVAT and Pascal VOC: one path per row."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data.source.walk import Folders
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


@dataclass(frozen=True, slots=True)
class ImageList:
    """A list, and where its images are looked up."""

    file: Path
    rows: list[Row]
    folders: Folders
    suffixes: frozenset[str]  # of images

    @property
    def root(self) -> Path:
        """The data set's folder."""
        return self.folders.root

    @property
    def voc_image_folder(self) -> Path:
        """The folder of the images that a list in VOC's ``ImageSets/Main`` names by their stems."""
        return self.file.parent.parent.parent / "JPEGImages"

    def row_of_image(self, images_of: Callable[[Row], Sequence[str]]) -> dict[str, Row]:
        """Returns the first row of each image, by its `Folders.real_image`. A row of several images has none.

        ``images_of``: returns the paths of the images that a row may name.
        """
        row_of_image: dict[str, Row] = {}
        for row in self.rows:
            images = images_of(row)
            if len(images) == 1:
                row_of_image.setdefault(self.folders.real_image(images[0]), row)
        return row_of_image


def read_list(file: Path, folders: Folders, suffixes: frozenset[str]) -> ImageList:
    """Reads a list. Raises UserError if it cannot be read."""
    return ImageList(file, read_rows(file), folders, suffixes)


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a list, whether or not their images exist. Raises UserError if it cannot be read."""
    return _rows(read_text(file, max_bytes=_MAX_BYTES))


def is_list(entry: Path) -> bool:
    """Returns whether an entry of a split is a list of images."""
    return entry.suffix.lower() == ".txt" and entry.is_file()


def is_row(path: str) -> bool:
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
