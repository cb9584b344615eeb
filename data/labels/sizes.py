"""Converts labels in pixels that were made for another size of their image, or for the photo before its EXIF rotation.

A label file may state the size of its image, of which its boxes are fractions. It may differ from the actual size by
one factor, if the image was resized after it was labeled; and it may be that of the photo as stored, which EXIF data
turns.
"""

from __future__ import annotations

import numpy as np

SizeHW = tuple[int, int]


class Fit:
    """Converts corners from the stated size of an image to its actual size."""

    def __init__(self, stated_hw: SizeHW, upright_hw: SizeHW, orientation: int) -> None:
        """``orientation``: EXIF orientation of the photo as stored, 1 to 8."""
        is_swapped = (stated_hw[0] - stated_hw[1]) * (upright_hw[0] - upright_hw[1]) < 0  # one is tall, one is wide
        self._orientation = orientation if is_swapped and orientation >= 5 else 1
        self._labeled_hw = stated_hw[::-1] if self._orientation != 1 else stated_hw
        self._upright_hw = upright_hw
        self._scale_yx = (upright_hw[0] / self._labeled_hw[0], upright_hw[1] / self._labeled_hw[1])
        # Whether the sizes are the same up to rounding, and boxes stay as they are.
        self.is_same = self._orientation == 1 and max(abs(a - b) for a, b in zip(stated_hw, upright_hw)) <= 1
        low = max((side - 1) / labeled for side, labeled in zip(upright_hw, self._labeled_hw))
        high = min((side + 1) / labeled for side, labeled in zip(upright_hw, self._labeled_hw))
        self.is_possible = self.is_same or low < high  # whether one factor, up to rounding, maps both sides

    @property
    def area_factor(self) -> float:
        return 1.0 if self.is_same else self._scale_yx[0] * self._scale_yx[1]

    def corners(self, corners: np.ndarray) -> np.ndarray:
        """Converts float64 (R, 4)."""
        if self.is_same:
            return corners
        scale_y, scale_x = self._scale_yx
        return turned_boxes(corners, self._labeled_hw, self._orientation) * [scale_x, scale_y, scale_x, scale_y]

    def __str__(self) -> str:
        stated_hw = self._labeled_hw if self._orientation == 1 else self._labeled_hw[::-1]
        return f"labels are for {_shown(stated_hw)}, the image is {_shown(self._upright_hw)} upright"


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


def _shown(size_hw: SizeHW) -> str:
    return f"{size_hw[1]}x{size_hw[0]}"
