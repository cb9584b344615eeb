"""Checks rows of labels, as all parsers return them, and detects rows that seem to mean something else.

A parser (`data.labels.yolo`, `voc`, `coco`) turns a file into rows and reports rows that are not boxes. Geometry is
checked here, for a whole split at once, so a data set has the same boxes in any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.labels.findings import CLIPPED, DUPLICATE, FRACTIONS, NO_AREA, OUTSIDE, REVERSED
from utils.strings import counted

# Increase this when the same label files would give other boxes. Then all index caches are rebuilt.
PARSER_VERSION = 5

LabelRow = tuple[float, ...]  # class, x1, y1, x2, y2, area, crowd, line, shape

MIN_SIDE_PX = 1e-3  # smaller sides are rounding errors of boxes without area
# What the four numbers of a box mean.
CENTERS = "cx cy w h"
TOP_LEFT = "x y w h"
CORNERS = "x1 y1 x2 y2"
# The four numbers of a box times this matrix are its corners x1, y1, x2, y2.
_CORNERS_OF = {
    CENTERS: np.array([[1, 0, 1, 0], [0, 1, 0, 1], [-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5]]),
    TOP_LEFT: np.array([[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1.0]]),
    CORNERS: np.eye(4),
}
_SLACK = 0.01  # fraction of the image's size by which a box may exceed it and still fit
_MAX_REVERSED_FRACTION = 1 / 3  # if more boxes have reversed corners, the numbers may not be corners at all
_MIN_FRACTION_CHECK_SIDE_PX = 16  # in images with a shorter side than this, a box of one pixel may be a box in pixels
# Other notations are tried if at least this many boxes, and this fraction of them, do not fit into their images.
_MIN_MISFITS = 5
_MIN_MISFIT_FRACTION = 0.02
_FAR = 0.1  # a box that exceeds its image by more than this fraction of a side is far outside
_MAX_BEYOND_FRACTION = 0.5  # if more boxes are far outside, they are not objects that the border cuts off
_MAX_UNEXPLAINED_FRACTION = 0.05  # another notation explains the misfits if it leaves at most this fraction of them


class RowProblem(NamedTuple):
    """A row that is not a box, or whose box was removed or clipped."""

    line: int
    kind: str
    text: str
    class_id: int = -1  # of a box whose geometry is the problem, or that YOLO txt gives an unknown class
    xyxy: tuple[float, ...] = ()  # its corners as labeled, in the units of the label file; empty: none


class RawLabels(NamedTuple):
    """Holds the labels of one image, before their geometry is checked."""

    rows: list[LabelRow]  # in file order
    problems: list[RowProblem]
    size_hw: tuple[int, int] | None = None  # image size according to the file
    named_image: str = ""  # the image that the label file itself names

    def add(self, parsed: LabelRow | RowProblem) -> None:
        """Adds a row, or the reason why it is not a box."""
        if isinstance(parsed, RowProblem):
            self.problems.append(parsed)
        else:
            self.rows.append(parsed)


def shape_of(points: Sequence[float]) -> int:
    """Returns a number that identifies the shape of a polygon: exact as float64, and never 0, the number of a box."""
    return (hash(tuple(points)) & 0xFFFFFFFFFFF) + 1


def is_plain_number_text(text: str) -> bool:
    """Returns False for numbers such as 1_0 or with digits of other scripts, which only Python's float accepts."""
    return text.isascii() and "_" not in text


class LabelFileError(Exception):
    """A label file cannot be used at all. The message begins with the line number if there is one."""


# Columns of a row table: the image's number, then the columns of RawLabels.rows. Rows of one box with different shapes
# are about different objects; 0 is the box itself.
IMAGE, CLASS, X1, Y1, X2, Y2, AREA, CROWD, LINE, SHAPE = range(10)
NUM_COLUMNS = 10


def row_table(image: int, rows: list[LabelRow]) -> np.ndarray:
    """Returns the rows of an image as float64 (R, 10)."""
    return np.array([(image, *row) for row in rows], np.float64).reshape(-1, NUM_COLUMNS)


class CleanBoxes(NamedTuple):
    """Valid boxes, by image and in file order."""

    image: np.ndarray  # int64 (M,)
    classes: np.ndarray  # int32 (M,)
    boxes_xywh_px: np.ndarray  # float64 (M, 4), inside the image
    area_px: np.ndarray  # float64 (M,)
    crowd: np.ndarray  # bool (M,)
    line: np.ndarray  # int32 (M,) line in the label file, as `LabelSource.where` takes it
    repeated: np.ndarray  # bool (M,) equal to an earlier box of the image: scored, but not trained on


@np.errstate(over="ignore", invalid="ignore")  # rows may hold any numbers; infinities are checked below
def clean_rows(
    table: np.ndarray, image_hw: np.ndarray, normalized: bool, *, is_misread: bool = False
) -> tuple[CleanBoxes, list[tuple[int, RowProblem]]]:
    """Clips boxes to their images, removes boxes without area or outside the image, and marks exact repetitions.

    Args:
        table: float64 (R, 10): `row_table` of each image, ascending.
        image_hw: int (N, 2) upright sizes.
        normalized: corners and areas are fractions of the image size, not pixels.
        is_misread: the numbers seem to mean something else (`other_notation`, `beyond_images`): boxes that do not fit
            are left out, which else are put in order and clipped.

    Returns:
        The remaining boxes; and for each row that is removed, changed or repeated, its image and the problem.
    """
    from utils.boxes import clip_xyxy, xyxy_to_xywh  # imports torch, which `check_data` does without

    image = table[:, IMAGE].astype(np.int64)
    size_wh = image_hw[image, ::-1].astype(np.float64)
    labeled = table[:, X1 : Y2 + 1]
    area = table[:, AREA]
    if normalized:
        labeled = labeled * np.tile(size_wh, 2)
        area = area * size_wh[:, 0] * size_wh[:, 1]
    is_reversed = (labeled[:, 2:] < labeled[:, :2]).any(1)
    corners = labeled
    if not is_misread:
        corners = _in_order(labeled)
        area = np.where(is_reversed, np.abs(area), area)
    inside = clip_xyxy(corners, *size_wh.T)

    lost = _lost_rows(corners, inside, size_wh, normalized=normalized, is_misread=is_misread)
    kept = ~(lost[NO_AREA] | lost[OUTSIDE] | lost[FRACTIONS])
    repeated = _repeated_rows(
        np.column_stack([image, table[:, CLASS], table[:, CROWD], corners, table[:, SHAPE]]), kept
    )
    # Labels are rounded to 0.01 px (COCO) or 1e-6 of the image size (YOLO); less is not reported.
    tolerance = 0.01 + 1e-5 * size_wh.max(1)
    clipped = kept & (np.abs(inside - corners).max(1, initial=0) > tolerance)
    changed = {DUPLICATE: repeated, CLIPPED: clipped & ~repeated, REVERSED: kept & is_reversed}
    findings = _findings(table, labeled, image_hw, lost | changed)

    table = table[kept]
    # The area of a clipped object is reduced by the same factor as its box.
    inside_size = (inside[:, 2:] - inside[:, :2])[kept]
    size = (corners[:, 2:] - corners[:, :2])[kept]
    area = area[kept] * np.where(clipped[kept], (inside_size / size).prod(1), 1)
    boxes = CleanBoxes(
        image=image[kept],
        classes=table[:, CLASS].astype(np.int32),
        boxes_xywh_px=xyxy_to_xywh(inside[kept]),
        area_px=np.where(np.isfinite(area), area, inside_size.prod(1)),
        crowd=table[:, CROWD] != 0,
        line=table[:, LINE].astype(np.int32),
        repeated=repeated[kept],
    )
    return boxes, findings


def _lost_rows(
    corners: np.ndarray, inside: np.ndarray, size_wh: np.ndarray, *, normalized: bool, is_misread: bool
) -> dict[str, np.ndarray]:
    """Returns which rows are left out, bool (R,), by kind of problem.

    Args:
        corners: float64 (R, 4), pixels.
        inside: the same, clipped to the images.
        size_wh: float64 (R, 2), sizes of the images.
        normalized: the labels are fractions of the image size.
        is_misread: see `clean_rows`.
    """
    size = corners[:, 2:] - corners[:, :2]
    has_area = ((size >= MIN_SIDE_PX) & np.isfinite(size)).all(1)
    fractions = np.zeros(len(corners), bool)
    if not normalized:
        fractions[has_area] = _are_fractions(corners[has_area], size_wh.min(1)[has_area])
    outside = has_area & ~(inside[:, 2:] - inside[:, :2] >= MIN_SIDE_PX).all(1)
    if is_misread:
        outside |= has_area & ~_fits(corners, np.tile(size_wh, 2))
    return {NO_AREA: ~has_area, OUTSIDE: outside, FRACTIONS: fractions}


def _repeated_rows(keys: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns which of the ``kept`` rows, bool (R,), equal an earlier one: bool (R,). ``keys``: float64 (R, K)."""
    rows = np.flatnonzero(kept)
    order = rows[np.lexsort(keys[rows].T[::-1])]  # stable: equal rows stay in file order
    repeated = np.zeros(len(keys), bool)
    repeated[order[1:]] = (keys[order[1:]] == keys[order[:-1]]).all(1)
    return repeated


def _in_order(corners: np.ndarray) -> np.ndarray:
    """Exchanges corners where necessary, so that x1 <= x2 and y1 <= y2."""
    return np.concatenate([np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])], 1)


def _are_fractions(corners: np.ndarray, shorter_side: np.ndarray) -> np.ndarray:
    """Returns which boxes, expected in pixels, are fractions of the image, bool (R,): those within the first pixel of
    an image, provided that all boxes are, or that one of them has a number that is not whole."""
    in_pixel = (corners >= 0).all(1) & (corners <= 1).all(1) & (shorter_side >= _MIN_FRACTION_CHECK_SIDE_PX)
    is_whole = (corners == corners.round()).all(1)
    return in_pixel & (in_pixel.all() or (in_pixel & ~is_whole).any())


def _findings(
    table: np.ndarray, corners: np.ndarray, image_hw: np.ndarray, masks: dict[str, np.ndarray]
) -> list[tuple[int, RowProblem]]:
    """Returns a problem for each row that one of ``masks``, bool (R,) by kind, marks, with the number of its image."""
    findings = []
    in_order = _in_order(corners)
    for kind, mask in masks.items():
        for row in np.flatnonzero(mask):
            image = int(table[row, IMAGE])
            box = ", ".join(f"{v:.6g}" for v in corners[row])
            height, width = image_hw[image]
            text = {
                NO_AREA: f"corners {box} px; left out",
                OUTSIDE: f"corners {box} px, image {width}x{height}; left out",
                FRACTIONS: f"corners {box} px: fractions of the image, {width}x{height}, expected pixels; left out",
                DUPLICATE: f"corners {box} px repeat an earlier row; training uses it once",
                CLIPPED: f"corners {box} px exceed the image, {width}x{height}; clipped to it",
                REVERSED: f"corners {box} px are in the wrong order; taken in order",
            }[kind]
            problem = RowProblem(
                line=int(table[row, LINE]),
                kind=kind,
                text=text,
                class_id=int(table[row, CLASS]),
                xyxy=tuple(in_order[row].tolist()),
            )
            findings.append((image, problem))
    return findings


@np.errstate(over="ignore", invalid="ignore")
def other_notation(table: np.ndarray, image_hw: np.ndarray, notation: str, *, normalized: bool) -> str:
    """Returns a message if the boxes seem to have another notation than ``notation``, else "". The other arguments are
    those of `clean_rows`."""
    corners = table[:, X1 : Y2 + 1]
    size = np.ones((len(table), 4)) if normalized else np.tile(image_hw[table[:, IMAGE].astype(np.int64), ::-1], 2)
    if normalized:  # a row whose area is not that of its box is a polygon, which has no other notation
        is_box = np.isclose((corners[:, 2:] - corners[:, :2]).prod(1), table[:, AREA], rtol=1e-6, atol=1e-12)
        corners = corners[is_box]
        size = size[is_box]
    numbers = corners @ np.linalg.inv(_CORNERS_OF[notation])
    misfits = {name: int((~_fits(numbers @ matrix, size)).sum()) for name, matrix in _CORNERS_OF.items()}
    own_misfits = misfits.pop(notation)
    is_reversed = (corners[:, 2:] < corners[:, :2]).any(1)
    if is_reversed.sum() <= _MAX_REVERSED_FRACTION * len(corners):  # `clean_rows` puts them in order
        own_misfits = int((~_fits(_in_order(corners), size)).sum())
    if own_misfits < max(_MIN_MISFITS, _MIN_MISFIT_FRACTION * len(numbers)):
        return ""
    best = min(misfits.values())
    if best > _MAX_UNEXPLAINED_FRACTION * own_misfits:
        return ""
    others = " or ".join(name for name, count in misfits.items() if count == best)
    return (
        f"{own_misfits:,} of {counted(len(numbers), 'box')} do not fit into their images as {notation}, but "
        f"{f'all but {best:,}' if best else 'all'} do as {others}: convert them to {notation}"
    )


@np.errstate(over="ignore", invalid="ignore")
def beyond_images(table: np.ndarray, image_hw: np.ndarray, *, normalized: bool) -> str:
    """Returns a message if the labels seem to be for other images or sizes, else ""; arguments as for `clean_rows`.

    Boxes that are wholly outside their images do not count: they are findings of their own.
    """
    corners = _in_order(table[:, X1 : Y2 + 1])
    size = np.ones((len(table), 4)) if normalized else np.tile(image_hw[table[:, IMAGE].astype(np.int64), ::-1], 2)
    exceeds = ((corners < -_FAR * size) | (corners > (1 + _FAR) * size)).any(1)
    overlaps = ((corners[:, 2:] > 0) & (corners[:, :2] < size[:, :2])).all(1)
    beyond = int((exceeds & overlaps).sum())
    if beyond < max(_MIN_MISFITS, _MAX_BEYOND_FRACTION * len(table)):
        return ""
    return (
        f"{beyond:,} of {counted(len(table), 'box')} exceed their images by more than {_FAR:.0%} of a side: are the "
        "labels for these images, and for this size of them?"
    )


def _fits(corners: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Returns which boxes lie within ``size``, float64 (R, 4), and have their corners in order: bool (R,)."""
    is_inside = (corners > -_SLACK * size) & (corners < (1 + _SLACK) * size)
    is_in_order = corners[:, 2:] > corners[:, :2]
    return np.asarray(is_inside.all(1) & is_in_order.all(1))


def ids_from_1(unknown: Sequence[int], classes: np.ndarray, num_classes: int) -> str:
    """Returns a message if the class ids of YOLO txt seem to start at 1, else "". ``unknown``: the ids that are not
    among the classes; ``classes``: (R,), all others."""
    if not unknown or (classes == 0).any() or any(number != num_classes for number in unknown):
        return ""
    return (
        f"the class ids seem to start at 1 ({counted(len(unknown), 'row')} of class {num_classes}, none of class 0); "
        "YOLO's start at 0: subtract 1 from the first number of each row, or put an unused name before the others in "
        "'names'"
    )


def too_dark(largest: int, bits: int) -> str:
    """Returns a message if 16-bit images use fewer bits than they are read with, else "". ``largest``: the largest
    pixel value; 0 if there are no such images."""
    expected_bits = 16 if bits == 8 else bits
    used_bits = largest.bit_length()
    if not largest or used_bits > expected_bits - 2:
        return ""
    return (
        f"no value of the 16-bit images is above {largest:,}, of {(1 << expected_bits) - 1:,} possible: they are read "
        f"as nearly black; write 'bits: {max(used_bits, 9)}' in the data set's YAML if that is what the camera has"
    )
