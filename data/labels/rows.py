"""Defines the rows of labels that all parsers return: boxes, and the problems of rows that are not boxes.

A parser (`data.labels.yolo`, `voc`, `coco`) converts a file to rows. `data.labels.clean` then checks whether the boxes
fit into the images, for a whole split at once, so that a data set has the same boxes in any format.

The row number locates a row in its label file: the line in a text file, from 1; the position of a COCO annotation, from
0; or, in an XML file with several objects on a line, the object's number, from 1. `LabelSource.where` formats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LabelRow = tuple[float, ...]  # class, x1, y1, x2, y2, area, crowd, row number, shape

# Columns of a row table: the image's number, then the columns of `LabelRow`. Rows with the same box but different
# shapes are different objects; shape 0 is the box itself.
IMAGE, CLASS, X1, Y1, X2, Y2, AREA, CROWD, ROW_NUMBER, SHAPE = range(10)
NUM_COLUMNS = 10


class RowProblem(NamedTuple):
    """A row that is not a box, or whose box was removed or changed; or a problem of a whole label file."""

    row_number: int  # see `data.labels.rows`; -1 for the whole file
    kind: str  # see `data.labels.findings`
    text: str  # description of the problem
    cause: str = ""  # ``text`` without the parts that differ between rows; empty if it has none
    consequence: str = ""  # such as "left out"
    class_id: int = -1  # class index of a box with a geometry problem, or with an unknown class in YOLO txt
    class_name: str = ""  # name of the class in the file, if it is unknown
    xyxy: tuple[float, ...] = ()  # labeled corners of the box, in the units of the label file; empty without a box


class RawLabels(NamedTuple):
    """The labels of one image, before their geometry is checked."""

    rows: list[LabelRow]  # in file order
    problems: list[RowProblem]
    size_hw: tuple[int, int] | None = None  # image size according to the file
    named_image: str = ""  # the image named in the label file
    is_by_line: bool = True  # whether row numbers are lines; else they count objects, because a line has several

    @property
    def num_labeled(self) -> int:
        """Number of labeled objects, usable or not."""
        return len(self.rows) + len(self.problems)

    def add(self, parsed: LabelRow | RowProblem) -> None:
        """Adds a row or a problem."""
        if isinstance(parsed, RowProblem):
            self.problems.append(parsed)
        else:
            self.rows.append(parsed)


class LabelFileError(Exception):
    """Raised if a label file is entirely unusable. The message begins with the line to correct, if there is one."""

    def __init__(self, reason: str, line: int = -1) -> None:
        super().__init__(f"{line}: {reason}" if line >= 0 else reason)
        self.reason = reason
        self.line = line


def row_table(image: int, rows: list[LabelRow]) -> np.ndarray:
    """Returns the rows of an image as float64 (R, 10)."""
    return np.array([(image, *row) for row in rows], np.float64).reshape(-1, NUM_COLUMNS)


def shape_of(points: Sequence[float]) -> int:
    """Returns a number that identifies the shape of a polygon, exact in float64 and never 0, the shape of a box."""
    return (hash(tuple(points)) & 0xFFFFFFFFFFF) + 1


def is_plain_number_text(text: str) -> bool:
    """Returns whether a text is free of numbers that only Python's float accepts, such as 1_0 or non-ASCII digits."""
    return text.isascii() and "_" not in text
