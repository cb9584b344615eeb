"""Defines label formats and the rows that all of them are read into.

Each format is a module of this package with a `LabelFormat`, listed in `data.labels.formats`. Its parser converts a
file to rows: a row is a box or a `Finding`. `data.labels.clean` then checks whether the boxes fit into the images,
for a whole split at once, so that a data set has the same boxes in any format.

The row number locates a row in its label file: its line, from 1, which several objects of an XML file may share; or the
position of a COCO annotation, from 0. `LabelSource.where` formats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from data.labels.categories import Category
from data.labels.findings import Finding
from utils.files.paths import path_of
from utils.files.safe_io import read_regular
from utils.machine.limits import explain_limit

UNREADABLE = (0, -1)  # stamp of a label that exists but is no file, such as a folder or a broken link
MAX_BYTES = 1 << 26  # largest label file of one image

LabelRow = tuple[float, ...]  # class, x1, y1, x2, y2, area, crowd, row number, shape

# Columns of a row table: the image's number, then the columns of `LabelRow`. Rows with the same box but different
# shapes are different objects; shape 0 is the box itself.
IMAGE, CLASS, X1, Y1, X2, Y2, AREA, CROWD, ROW_NUMBER, SHAPE = range(10)
NUM_COLUMNS = 10


class RawLabels(NamedTuple):
    """The labels of one image, before their geometry is checked."""

    rows: list[LabelRow]  # in file order
    problems: list[Finding]  # rows that are no box, without `where` and `image`; corners as in the file
    size_hw: tuple[int, int] | None = None  # image size according to the file

    @property
    def num_labeled(self) -> int:
        """Number of labeled objects, usable or not."""
        return len(self.rows) + len(self.problems)

    def add(self, parsed: LabelRow | Finding) -> None:
        """Adds a row or a problem."""
        if isinstance(parsed, Finding):
            self.problems.append(parsed)
        else:
            self.rows.append(parsed)


class LabelFileError(Exception):
    """Raised if a label file is entirely unusable."""

    def __init__(self, reason: str, line: int = -1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line  # line to correct, or -1


@dataclass(frozen=True)
class Listing:
    """The images of a split, sorted by name, and their label files, as `data.listing.listing.list_split` finds them.

    Names are relative to `root`, with ``/``. Nothing else looks for files: labels, fingerprints and messages follow
    from the listing.
    """

    root: Path  # the data set's folder
    named_root: str  # the same with ``/``; of a staged copy, that of the original, which absolute names in labels have
    images: list[str]  # N
    image_stamps: np.ndarray  # int64 (N, 2): size in bytes, modification time in ns
    label_format: LabelFormat
    labels: list[str]  # N: each image's label file, or where it would be; or one name: a JSON for all images
    label_stamps: np.ndarray  # int64 (len(labels), 2); `ABSENT` (a background) or `UNREADABLE`: no file
    findings: list[Finding]  # about images and label files that are not used; `Finding.image` is -1
    json_images: list[str] = field(default_factory=list)  # JSON only: images of all splits that name it, sorted
    # JSON only: images beside them, of no split that names it, sorted; None if a split that names it has no images here
    other_images: list[str] | None = None


class LabelSource(Protocol):
    """Reads the labels of a split, image by image."""

    normalized: bool  # whether coordinates are fractions of the image size, not pixels
    images: list[str]  # names of the images that have or may have labels in this source
    image_ids: list[int | str] | None  # of ``images``; None if the format has none
    categories: tuple[Category, ...]  # categories of the label file; empty if the format has none
    findings: list[Finding]  # about labels that are of none of ``images``

    def read(self, i: int) -> RawLabels | None:
        """Reads the labels of ``images[i]``, None without a label file. Raises LabelFileError if it is unusable."""

    def where(self, i: int, row_number: int | None = None) -> str:
        """Returns, for the report, the label file of ``images[i]``, with the location of a row that `read` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFormat:
    """A label format. All functions are module-level functions, so that a format can be pickled."""

    name: str  # part of the fingerprint of an index
    suffix: str  # of its label files, lower case
    is_per_image: bool  # whether each image has a label file; else a split has one for all images
    in_annotations: bool  # whether 'annotations' in the YAML names the folder, or the file, of the labels
    # Reads the labels of a split, for class names, or None if every object is of class 0. Raises UserError for an
    # unusable label file of a split.
    read: Callable[[Listing, tuple[str, ...] | None], LabelSource]
    # Number of objects in the content of an image's label file; None: there is no such file.
    num_objects: Callable[[bytes], int] | None = None
    # Returns the class names in the annotations of the splits, ordered by id; None if annotations define no classes.
    class_names: Callable[[Sequence[Path]], tuple[str, ...]] | None = None


class LabelPerImage:
    """A `LabelSource` that reads labels from one file per image."""

    image_ids: list[int | str] | None = None
    categories: tuple[Category, ...] = ()

    def __init__(self, listing: Listing, parse: Callable[[bytes], RawLabels], *, normalized: bool) -> None:
        self.images = listing.images
        self.normalized = normalized
        self.findings: list[Finding] = []
        self._labels = listing.labels
        self._exists = (listing.label_stamps[:, 0] >= 0).tolist()
        self._is_unreadable = (listing.label_stamps == UNREADABLE).all(1).tolist()
        self._root = listing.root
        self._parse = parse

    def read(self, i: int) -> RawLabels | None:
        if not self._exists[i]:
            return None
        if self._is_unreadable[i]:  # a staged copy may still have an older file there
            raise LabelFileError("not a file that can be read")
        path = path_of(self._labels[i], self._root)
        try:
            data = read_regular(path, max_bytes=MAX_BYTES)
        except OSError as error:
            if explain_limit(error):  # a failure of the machine; the file itself may be correct
                error.filename = path
                raise
            raise LabelFileError(f"cannot be read ({error.strerror})") from None
        return self._parse(data)

    def where(self, i: int, row_number: int | None = None) -> str:
        name = self._labels[i]
        return name if row_number is None else f"{name}:{row_number}"


def row_table(image: int, rows: list[LabelRow]) -> np.ndarray:
    """Returns the rows of an image as float64 (R, 10)."""
    return np.array([(image, *row) for row in rows], np.float64).reshape(-1, NUM_COLUMNS)


def shape_of(points: Sequence[float]) -> int:
    """Returns a number that identifies the shape of a polygon, exact in float64 and never 0, the shape of a box."""
    return (hash(tuple(points)) & 0xFFFFFFFFFFF) + 1
