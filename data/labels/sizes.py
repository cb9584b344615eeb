"""Labels in pixels that were made for another size of their image, or for the photo before its EXIF turn.

A label file may state the size of its image. If the image has another one, all of its boxes are wrong. Where one cause
explains the difference, the boxes are computed: a photo whose sides are swapped and whose EXIF data turns it, or one
factor for all others. Else the image is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from data.labels.clean import AREA, IMAGE, X1, X2, Y1, Y2, RowProblem
from data.labels.findings import SCALED, SIZE, TURNED

_SLACK = 0.01  # of a side, by which boxes may exceed the labeled size
_MOST_BEYOND = 0.05  # of the boxes: if more exceed it, the labeled size is wrong, not the boxes

SizeHW = tuple[int, int]


class FittedRows(NamedTuple):
    """Rows of labels in the pixels of their images."""

    table: np.ndarray  # float64 (R, 10), without the rows of images that are left out
    problems: list[tuple[int, RowProblem]]  # of each image with another size


def fit_to_images(
    table: np.ndarray, image_hw: np.ndarray, labeled_hw: Mapping[int, SizeHW], orientation_of: Callable[[int], int]
) -> FittedRows:
    """Computes the boxes of images for which the labels state another size, or leaves these images out.

    Args:
        table: float64 (R, 10), in pixels: `row_table` of each image, ascending.
        image_hw: int (N, 2) upright sizes.
        labeled_hw: the size that the labels state, by the numbers of the images that have another one.
        orientation_of: the EXIF orientation, 1 to 8, of an image.
    """
    images = np.array(sorted(labeled_hw), np.int64)
    stored = np.array([labeled_hw[i] for i in images.tolist()], np.int64).reshape(-1, 2)
    upright = image_hw[images].astype(np.int64)
    is_tall, should_be_tall = stored[:, 0] > stored[:, 1], upright[:, 0] > upright[:, 1]
    swapped = (is_tall != should_be_tall) & (stored[:, 0] != stored[:, 1])
    orientation = np.ones(len(images), np.int64)
    orientation[swapped] = [orientation_of(i) for i in images[swapped].tolist()]
    orientation[orientation < 5] = 1  # the others keep the sides
    turned = orientation > 1
    labeled = np.where(turned[:, None], stored[:, ::-1], stored)  # upright

    is_turn = (labeled == upright).all(1)
    explained = is_turn | _have_one_factor(labeled[~is_turn], upright[~is_turn])
    for group in (is_turn, ~is_turn):
        if _exceeds(table, images[group], stored[group], upright[group]):
            explained &= ~group
    fitted = table.copy()
    for number in np.flatnonzero(explained).tolist():
        first, last = np.searchsorted(table[:, IMAGE], [images[number], images[number] + 1])
        rows = fitted[first:last]
        rows[:, X1 : Y2 + 1] = turned_boxes(rows[:, X1 : Y2 + 1], labeled[number], int(orientation[number]))
        scale_yx = upright[number] / labeled[number]
        rows[:, [X1, X2]] *= scale_yx[1]
        rows[:, [Y1, Y2]] *= scale_yx[0]
        rows[:, AREA] *= scale_yx.prod()
    problems = []
    for number, image in enumerate(images.tolist()):
        sizes = f"labels are for {_shown(stored[number])}, the image is {_shown(upright[number])} upright"
        if not explained[number]:
            problems.append((image, RowProblem(-1, SIZE, f"{sizes}; image left out")))
        elif is_turn[number]:
            problems.append((image, RowProblem(-1, TURNED, f"{sizes} (EXIF); boxes are turned with it")))
        else:
            factor = f"{upright[number].max() / labeled[number].max():.4g}"
            problems.append((image, RowProblem(-1, SCALED, f"{sizes}; boxes are scaled by {factor}")))
    lost = images[~explained]
    return FittedRows(fitted[~np.isin(table[:, IMAGE], lost)], problems)


def turned_boxes(corners: np.ndarray, upright_hw: np.ndarray, orientation: int) -> np.ndarray:
    """Corners float64 (R, 4) in a photo as stored, in the upright one of this size. ``orientation``: 1, or 5 to 8."""
    height, width = (float(side) for side in upright_hw)
    x1, y1, x2, y2 = corners.T
    upright = {
        1: (x1, y1, x2, y2),
        5: (y1, x1, y2, x2),
        6: (width - y2, x1, width - y1, x2),
        7: (width - y2, height - x2, width - y1, height - x1),
        8: (y1, height - x2, y2, height - x1),
    }[orientation]
    return np.stack(upright, 1)


def _have_one_factor(labeled_hw: np.ndarray, image_hw: np.ndarray) -> bool:
    """Whether all sizes (m, 2) are the labeled ones times one number, rounded up or down."""
    if not len(labeled_hw):
        return False
    least, most = (image_hw - 1) / labeled_hw, (image_hw + 1) / labeled_hw
    return bool(least.max() < most.min())


def _exceeds(table: np.ndarray, images: np.ndarray, labeled_hw: np.ndarray, image_hw: np.ndarray) -> bool:
    """Whether boxes do not fit into the labeled sizes, and more do into those of the ``images`` as they are."""
    rows = table[np.isin(table[:, IMAGE], images)]
    position = np.searchsorted(images, rows[:, IMAGE].astype(np.int64))
    beyond = [
        int((np.abs(rows[:, X1 : Y2 + 1]) > (1 + _SLACK) * np.tile(size[position, ::-1], 2)).any(1).sum())
        for size in (labeled_hw, image_hw)
    ]
    return beyond[0] > max(_MOST_BEYOND * len(rows), beyond[1])


def _shown(size_hw: np.ndarray) -> str:
    return f"{size_hw[1]}x{size_hw[0]}"
