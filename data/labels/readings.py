"""Whether the labels of a whole split look like another notation than that of their format: what a scan advises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.labels.clean import AREA, IMAGE, X1, Y2
from data.labels.label_format import CENTERS, CORNERS, TOP_LEFT
from utils.strings import counted

# The four numbers of a box times this matrix are its corners x1, y1, x2, y2.
_CORNERS_OF = {
    CENTERS: np.array([[1, 0, 1, 0], [0, 1, 0, 1], [-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5]]),
    TOP_LEFT: np.array([[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1.0]]),
    CORNERS: np.eye(4),
}
_SLACK = 0.01  # of the image's size, by which boxes may exceed it
_LEAST_MISFITS, _LEAST_SHARE = 5, 0.02  # boxes that do not fit, from which on other readings are tried
_MOST_LEFT = 0.05  # of these, that do not fit the other reading either


@np.errstate(over="ignore", invalid="ignore")
def other_notation(table: np.ndarray, image_hw: np.ndarray, notation: str, *, normalized: bool) -> str:
    """What the boxes of a split seem to be instead of ``notation``, as of a `LabelFormat`; "" if they fit it.

    Args:
        table: float64 (R, 9), see `data.labels.clean.row_table`.
        image_hw: int (N, 2).
        normalized: as of `data.labels.clean.clean_rows`.
    """
    corners = table[:, X1 : Y2 + 1]
    size = np.ones((len(table), 4)) if normalized else np.tile(image_hw[table[:, IMAGE].astype(np.int64), ::-1], 2)
    if normalized:  # an area of its own is that of a polygon, which has no other notation
        is_box = np.isclose((corners[:, 2:] - corners[:, :2]).prod(1), table[:, AREA], rtol=1e-6, atol=1e-12)
        corners, size = corners[is_box], size[is_box]
    numbers = corners @ np.linalg.inv(_CORNERS_OF[notation])
    misfits = {name: int((~_fits(numbers @ matrix, size)).sum()) for name, matrix in _CORNERS_OF.items()}
    mine = misfits.pop(notation)
    if mine < max(_LEAST_MISFITS, _LEAST_SHARE * len(numbers)):
        return ""
    best = min(misfits.values())
    if best > _MOST_LEFT * mine:
        return ""
    others = " or ".join(name for name, count in misfits.items() if count == best)
    return (
        f"{mine:,} of {counted(len(numbers), 'box')} do not fit into their images as {notation}, but "
        f"{f'all but {best:,}' if best else 'all'} do as {others}: convert them to {notation}"
    )


def _fits(corners: np.ndarray, size: np.ndarray) -> np.ndarray:
    inside = (corners > -_SLACK * size) & (corners < (1 + _SLACK) * size)
    return inside.all(1) & (corners[:, 2:] > corners[:, :2]).all(1)


def ids_from_1(unknown: Sequence[int], classes: np.ndarray, num_classes: int) -> str:
    """Whether the class ids of YOLO txt seem to start at 1, with what to do; "" if not.

    Args:
        unknown: the ids in the rows of unknown classes.
        classes: int (R,) the classes of all others.
    """
    if not unknown or (classes == 0).any() or any(number != num_classes for number in unknown):
        return ""
    return (
        f"the class ids seem to start at 1 ({counted(len(unknown), 'row')} of class {num_classes}, none of class 0); "
        "YOLO's start at 0: subtract 1 from the first number of each row, or put an unused name before the others in "
        "'names'"
    )


def too_dark(largest: int, bits: int) -> str:
    """Whether 16-bit images have samples of fewer bits than they are read as, with what to do; "" if not.

    Args:
        largest: sample of all 16-bit images.
        bits: of the data set's `PixelFormat`; images of 16 bits are divided by 257 for 8.
    """
    expected, found = 16 if bits == 8 else bits, largest.bit_length()
    if not largest or found > expected - 2:
        return ""
    return (
        f"no sample of the 16-bit images is above {largest:,}, of {(1 << expected) - 1:,} possible: they are read as "
        f"nearly black; write 'bits: {max(found, 9)}' in the data set's YAML if that is what the camera has"
    )
