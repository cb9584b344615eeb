"""Adapts labels in pixels that were made for another size of their image, or for the photo before its EXIF rotation.

A label file may contain the size of its image. If the actual size differs, all boxes are wrong. They are converted if
one cause explains the difference: a photo with swapped sides that its EXIF data rotates, or one scale factor for all
other images. Otherwise the image is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from data.labels.findings import SCALED, SIZE, TURNED
from data.labels.rows import AREA, IMAGE, X1, Y2, RowProblem

_SIZE_TOLERANCE = 0.01  # fraction of a side by which boxes may exceed the labeled size
_MAX_EXCEEDING_FRACTION = 0.05  # if more boxes exceed the labeled size, that size is wrong, not the boxes

SizeHW = tuple[int, int]


class _Mismatch(NamedTuple):
    """An image whose labels state another size."""

    image: int  # number of the image
    stated_hw: SizeHW
    upright_hw: SizeHW  # actual size of the image
    orientation: int  # EXIF orientation, 5 to 8, if the stated size is from before the rotation; else 1

    @property
    def labeled_hw(self) -> SizeHW:
        """The stated size after the rotation."""
        return self.stated_hw if self.orientation == 1 else self.stated_hw[::-1]

    @property
    def is_rounding(self) -> bool:
        """Whether the sizes differ by at most one pixel."""
        return self.orientation == 1 and max(abs(a - b) for a, b in zip(self.stated_hw, self.upright_hw)) <= 1

    @property
    def is_turn(self) -> bool:
        """Whether the rotation alone explains the size."""
        return self.labeled_hw == self.upright_hw


class FittedRows(NamedTuple):
    """Rows of labels in pixels of the actual images."""

    table: np.ndarray  # float64 (R, 10), without the rows of images that are left out
    problems: list[tuple[int, RowProblem]]  # number and problem of each image with another size
    mismatch_of: dict[int, _Mismatch]  # mismatches by image number, for the images whose rows are converted

    def in_image(self, image: int, corners: tuple[float, ...]) -> tuple[float, ...]:
        """Converts the corners of a row that is not in the table from labeled pixels to pixels of the actual image."""
        if image not in self.mismatch_of or not corners:
            return corners
        return tuple(_to_image(np.array([corners]), self.mismatch_of[image])[0].tolist())


def fit_to_images(
    table: np.ndarray, image_hw: np.ndarray, stated_hw: Mapping[int, SizeHW], orientations: Sequence[int]
) -> FittedRows:
    """Converts the boxes of images whose labels state another size, or leaves these images out.

    Args:
        table: float64 (R, 10), in pixels: `row_table` of each image, ascending.
        image_hw: int (N, 2) upright sizes.
        stated_hw: the size that the labels state, by image number, for images of another size.
        orientations: EXIF orientations of all N images, 1 to 8.
    """
    mismatches = [_mismatch(i, stated, tuple(image_hw[i].tolist()), orientations[i]) for i, stated in stated_hw.items()]
    mismatches = [mismatch for mismatch in mismatches if not mismatch.is_rounding]
    turns = [mismatch for mismatch in mismatches if mismatch.is_turn]
    others = [mismatch for mismatch in mismatches if not mismatch.is_turn]
    explained: set[int] = set()
    if turns and not _boxes_contradict(turns, table):
        explained |= {mismatch.image for mismatch in turns}
    if others and _have_one_factor(others) and not _boxes_contradict(others, table):
        explained |= {mismatch.image for mismatch in others}

    mismatch_of = {mismatch.image: mismatch for mismatch in mismatches if mismatch.image in explained}
    fitted = table.copy()
    for image, mismatch in mismatch_of.items():
        first, last = np.searchsorted(table[:, IMAGE], [image, image + 1])
        rows = fitted[first:last]
        rows[:, X1 : Y2 + 1] = _to_image(rows[:, X1 : Y2 + 1], mismatch)
        rows[:, AREA] *= np.prod(_scale_yx(mismatch))
    lost = [mismatch.image for mismatch in mismatches if mismatch.image not in explained]
    problems = [(mismatch.image, _problem(mismatch, mismatch.image in explained)) for mismatch in mismatches]
    return FittedRows(fitted[~np.isin(table[:, IMAGE], lost)], problems, mismatch_of)


def _mismatch(image: int, stated_hw: SizeHW, upright_hw: SizeHW, orientation: int) -> _Mismatch:
    is_swapped = (stated_hw[0] - stated_hw[1]) * (upright_hw[0] - upright_hw[1]) < 0  # one is tall, one is wide
    is_turned = is_swapped and orientation >= 5
    return _Mismatch(image, stated_hw, upright_hw, orientation if is_turned else 1)


def _scale_yx(mismatch: _Mismatch) -> tuple[float, float]:
    """Returns the factors from the labeled sides, after the rotation, to the sides of the image."""
    (labeled_height, labeled_width), (height, width) = mismatch.labeled_hw, mismatch.upright_hw
    return height / labeled_height, width / labeled_width


def _to_image(corners: np.ndarray, mismatch: _Mismatch) -> np.ndarray:
    """Rotates and scales the labeled ``corners`` of an image, float64 (R, 4), to its actual pixels."""
    scale_y, scale_x = _scale_yx(mismatch)
    turned = turned_boxes(corners, mismatch.labeled_hw, mismatch.orientation)
    return turned * np.array([scale_x, scale_y, scale_x, scale_y])


def _problem(mismatch: _Mismatch, is_explained: bool) -> RowProblem:
    sizes = f"labels are for {_shown(mismatch.stated_hw)}, the image is {_shown(mismatch.upright_hw)} upright"
    if not is_explained:
        return RowProblem(-1, SIZE, sizes, consequence="image left out")
    if mismatch.is_turn:
        return RowProblem(-1, TURNED, f"{sizes} (EXIF)", consequence="boxes are turned with it")
    turned = "turned and " if mismatch.orientation != 1 else ""
    factor = max(mismatch.upright_hw) / max(mismatch.labeled_hw)
    return RowProblem(-1, SCALED, sizes, consequence=f"boxes are {turned}scaled by {factor:.4g}")


def turned_boxes(corners: np.ndarray, upright_hw: SizeHW, orientation: int) -> np.ndarray:
    """Maps corners, float64 (R, 4), from a photo as stored to the upright photo. ``orientation``: EXIF orientation, 1
    or 5 to 8."""
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


def _have_one_factor(mismatches: Sequence[_Mismatch]) -> bool:
    """Returns whether one scale factor, up to rounding, maps the labeled sizes to the sizes of all images."""
    labeled = np.array([mismatch.labeled_hw for mismatch in mismatches], np.float64)
    upright = np.array([mismatch.upright_hw for mismatch in mismatches], np.float64)
    return bool(((upright - 1) / labeled).max() < ((upright + 1) / labeled).min())


def _boxes_contradict(mismatches: Sequence[_Mismatch], table: np.ndarray) -> bool:
    """Returns whether boxes exceed the stated sizes and fewer exceed the actual sizes. Then the stated sizes are wrong,
    not the boxes."""
    images = np.array([mismatch.image for mismatch in mismatches])
    rows = table[np.isin(table[:, IMAGE], images)]
    order = np.argsort(images)
    number = order[np.searchsorted(images, rows[:, IMAGE], sorter=order)]
    beyond = []
    for sizes in ([mismatch.stated_hw for mismatch in mismatches], [mismatch.upright_hw for mismatch in mismatches]):
        limits = (1 + _SIZE_TOLERANCE) * np.array(sizes)[number][:, [1, 0, 1, 0]]
        beyond.append(int((np.abs(rows[:, X1 : Y2 + 1]) > limits).any(1).sum()))
    return beyond[0] > max(_MAX_EXCEEDING_FRACTION * len(rows), beyond[1])


def _shown(size_hw: SizeHW) -> str:
    return f"{size_hw[1]}x{size_hw[0]}"
