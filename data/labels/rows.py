"""Defines the rows of labels as all parsers return them: boxes, and what is wrong with rows that are none.

A parser (`data.labels.yolo`, `voc`, `coco`) turns a file into rows. Whether their boxes fit into the images is checked
afterwards (`data.labels.clean`), for a whole split at once, so a data set has the same boxes in any format.

The number of a row tells where it is in its label file: the line of a text file, from 1; else the position of a COCO
annotation, from 0, or that of an object among those of an XML file in one line, from 1. `LabelSource.where` names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LabelRow = tuple[float, ...]  # class, x1, y1, x2, y2, area, crowd, row number, shape

# Columns of a row table: the image's number, then the columns of `LabelRow`. Rows of one box with different shapes are
# about different objects; 0 is the box itself.
IMAGE, CLASS, X1, Y1, X2, Y2, AREA, CROWD, ROW_NUMBER, SHAPE = range(10)
NUM_COLUMNS = 10


class RowProblem(NamedTuple):
    """A row that is not a box, or whose box was removed or changed; or a problem of a whole label file."""

    row_number: int  # see `data.labels.rows`; -1: the whole file
    kind: str  # see `data.labels.findings`
    text: str  # what is wrong
    cause: str = ""  # the same, without what differs from row to row; empty: ``text`` is the same for all
    consequence: str = ""  # what becomes of it, such as "left out"
    class_id: int = -1  # of a box whose geometry is the problem, or that YOLO txt gives an unknown class
    class_name: str = ""  # what the file calls the class, if it is unknown
    xyxy: tuple[float, ...] = ()  # corners of the box as labeled, in the units of the label file; empty: none


class RawLabels(NamedTuple):
    """Holds the labels of one image, before their geometry is checked."""

    rows: list[LabelRow]  # in file order
    problems: list[RowProblem]
    size_hw: tuple[int, int] | None = None  # image size according to the file
    named_image: str = ""  # the image that the label file itself names
    is_by_line: bool = True  # row numbers are lines; False: they count the objects of a file, as one line has several

    @property
    def num_labeled(self) -> int:
        """Counts the labeled objects, whether they can be used or not."""
        return len(self.rows) + len(self.problems)

    def add(self, parsed: LabelRow | RowProblem) -> None:
        """Adds a row, or the reason why it is not a box."""
        if isinstance(parsed, RowProblem):
            self.problems.append(parsed)
        else:
            self.rows.append(parsed)


class LabelFileError(Exception):
    """A label file cannot be used at all. The message begins with the line to correct, if there is one."""

    def __init__(self, reason: str, line: int = -1) -> None:
        super().__init__(f"{line}: {reason}" if line >= 0 else reason)
        self.reason = reason
        self.line = line


def row_table(image: int, rows: list[LabelRow]) -> np.ndarray:
    """Returns the rows of an image as float64 (R, 10)."""
    return np.array([(image, *row) for row in rows], np.float64).reshape(-1, NUM_COLUMNS)


def shape_of(points: Sequence[float]) -> int:
    """Returns a number that identifies the shape of a polygon: exact as float64, and never 0, the number of a box."""
    return (hash(tuple(points)) & 0xFFFFFFFFFFF) + 1


def is_plain_number_text(text: str) -> bool:
    """Returns False for numbers such as 1_0 or with digits of other scripts, which only Python's float accepts."""
    return text.isascii() and "_" not in text
