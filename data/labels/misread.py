"""Detects labels whose numbers seem to have another meaning than in their format, and images that are read too dark.

Each function returns a message with advice for the user, or "" if nothing seems to be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.labels.clean import fits, in_order
from data.labels.label_format import CENTERS, CORNERS, TOP_LEFT
from data.labels.rows import AREA, IMAGE, X1, Y2
from utils.strings import counted

# The four numbers of a box times its notation's matrix are its corners x1, y1, x2, y2.
_CORNERS_OF = {
    CENTERS: np.array([[1, 0, 1, 0], [0, 1, 0, 1], [-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5]]),
    TOP_LEFT: np.array([[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1.0]]),
    CORNERS: np.eye(4),
}
_MAX_REVERSED_FRACTION = 1 / 3  # if more boxes have reversed corners, the numbers may not be corners at all
# Other notations are tried if at least this number and this fraction of boxes do not fit into their images.
_MIN_MISFITS = 5
_MIN_MISFIT_FRACTION = 0.02
_MAX_UNEXPLAINED_FRACTION = 0.05  # another notation explains the misfits if it leaves at most this fraction of them
_FAR = 0.1  # a box that exceeds its image by more than this fraction of a side is far outside
_MAX_FAR_OUTSIDE_FRACTION = 0.5  # if more boxes are far outside, they are not objects cut off by the border


def misread_boxes(table: np.ndarray, image_hw: np.ndarray, notation: str, *, normalized: bool) -> str:
    """Returns a message if the boxes seem to have another notation than ``notation``, or to be for other images. For
    the other arguments, see `clean_rows`."""
    message = _other_notation(table, image_hw, notation, normalized=normalized)
    return message or _boxes_exceed_images(table, image_hw, normalized=normalized)


@np.errstate(over="ignore", invalid="ignore")  # rows may hold any numbers
def _other_notation(table: np.ndarray, image_hw: np.ndarray, notation: str, *, normalized: bool) -> str:
    """Returns a message if the boxes seem to have another notation. For the arguments, see `misread_boxes`."""
    corners = table[:, X1 : Y2 + 1]
    size = _sizes(table, image_hw, normalized=normalized)
    if normalized:  # a row whose area differs from its box's area is a polygon, which has no other notation
        is_box = np.isclose((corners[:, 2:] - corners[:, :2]).prod(1), table[:, AREA], rtol=1e-6, atol=1e-12)
        corners = corners[is_box]
        size = size[is_box]
    num_misfits = _num_misfits(corners, size)
    if num_misfits < max(_MIN_MISFITS, _MIN_MISFIT_FRACTION * len(corners)):
        return ""

    # For example, the reader of centers has converted "100 100 500 300" to the corners (-150, -50, 350, 250). The
    # inverse matrix restores the numbers, which fit into an image of 640x480 if they are corners.
    numbers = corners @ np.linalg.inv(_CORNERS_OF[notation])
    others = _CORNERS_OF.keys() - {notation}
    misfits_as = {other: int((~fits(numbers @ _CORNERS_OF[other], size)).sum()) for other in others}
    fewest = min(misfits_as.values())
    if fewest > _MAX_UNEXPLAINED_FRACTION * num_misfits:
        return ""
    best = " or ".join(other for other in _CORNERS_OF if misfits_as.get(other) == fewest)
    return (
        f"{num_misfits:,} of {counted(len(numbers), 'box')} do not fit into their images as {notation}, but "
        f"{f'all but {fewest:,}' if fewest else 'all'} do as {best}: convert them to {notation}"
    )


def _num_misfits(corners: np.ndarray, size: np.ndarray) -> int:
    """Returns the number of boxes, corners float64 (R, 4) as computed by the reader, that do not fit into their images.
    A few reversed corners do not count, because `clean_rows` puts them in order."""
    is_reversed = (corners[:, 2:] < corners[:, :2]).any(1)
    if is_reversed.sum() <= _MAX_REVERSED_FRACTION * len(corners):
        corners = in_order(corners)
    return int((~fits(corners, size)).sum())


@np.errstate(over="ignore", invalid="ignore")
def _boxes_exceed_images(table: np.ndarray, image_hw: np.ndarray, *, normalized: bool) -> str:
    """Returns a message if the labels seem to be for other images or sizes. For the arguments, see `misread_boxes`.

    Boxes entirely outside their images do not count, because they have their own findings.
    """
    corners = in_order(table[:, X1 : Y2 + 1])
    size = _sizes(table, image_hw, normalized=normalized)
    exceeds = ((corners < -_FAR * size) | (corners > (1 + _FAR) * size)).any(1)
    overlaps = ((corners[:, 2:] > 0) & (corners[:, :2] < size[:, :2])).all(1)
    beyond = int((exceeds & overlaps).sum())
    if beyond < max(_MIN_MISFITS, _MAX_FAR_OUTSIDE_FRACTION * len(table)):
        return ""
    return (
        f"{beyond:,} of {counted(len(table), 'box')} exceed their images by more than {_FAR:.0%} of a side: are the "
        "labels for these images, and for this size of them?"
    )


def _sizes(table: np.ndarray, image_hw: np.ndarray, *, normalized: bool) -> np.ndarray:
    """Returns the largest possible corners in each row's image, (R, 4), in the units of the labels."""
    if normalized:
        return np.ones((len(table), 4))
    return np.tile(image_hw[table[:, IMAGE].astype(np.int64), ::-1], 2)


def ids_from_1(unknown: Sequence[int], classes: np.ndarray, num_classes: int) -> str:
    """Returns a message if the class ids of YOLO txt seem to start at 1. ``unknown``: ids that are not among the
    classes; ``classes``: all other ids, (R,)."""
    if not unknown or (classes == 0).any() or any(number != num_classes for number in unknown):
        return ""
    return (
        f"the class ids seem to start at 1 ({counted(len(unknown), 'row')} of class {num_classes}, none of class 0); "
        "YOLO's start at 0: subtract 1 from the first number of each row, or put an unused name before the others in "
        "'names'"
    )


def too_dark(largest: int, bits: int) -> str:
    """Returns a message if 16-bit images use at least two bits fewer than they are read with. ``largest``: the largest
    pixel value, or 0 if there are no such images."""
    expected_bits = 16 if bits == 8 else bits
    used_bits = largest.bit_length()
    if not largest or used_bits > expected_bits - 2:
        return ""
    return (
        f"no value of the 16-bit images is above {largest:,}, of {(1 << expected_bits) - 1:,} possible: they are read "
        f"as nearly black; write 'bits: {max(used_bits, 9)}' in the data set's YAML if that is the camera's bit depth"
    )
