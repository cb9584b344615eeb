"""Letterboxing, for validation and inference: fits an image into a canvas of another aspect and pads it with gray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import cv2
import numpy as np

from utils.pixels import padding_value

# Padding on a rectangular canvas, both sides together, in strides, as in the published evaluations of YOLO models.
# Without padding AP is lower by 0.01, measured on models fine-tuned on seven data sets (benchmarks/LOG.md).
PADDING = Fraction(1, 2)


class Letterbox(NamedTuple):
    """The fit of an image into a canvas: canvas pixels = original pixels * gain + pad, for each axis.

    The gains of the axes differ slightly, because both sides of the resized image are whole numbers of pixels.
    """

    width: int  # width and height of the resized image, pixels
    height: int
    pad_x: int
    pad_y: int
    gain_x: float
    gain_y: float


@dataclass(frozen=True)
class CanvasRule:
    """Chooses the canvas of an image, in the same way for validation and detection.

    The scores and the threshold of a validation hold for detection only if the model sees the same pixels. Therefore
    the canvas depends only on the size of the image, not on the images that share its batch.

    Attributes:
        imgsz: longer side of the scaled image, pixels.
        stride: divisor of the canvas sides.
        is_square: whether all canvases are squares, with sides of ``imgsz`` rounded up to whole strides; otherwise each
            is the smallest rectangle of whole strides that leaves `PADDING` around the image.
        fixed_hw: the only canvas that the model takes, pixels; None if it takes any.
    """

    imgsz: int
    stride: int
    is_square: bool = False
    fixed_hw: tuple[int, int] | None = None

    def canvas_hw(self, image_hw: tuple[int, int]) -> tuple[int, int]:
        """Returns height and width of the canvas for an image of the size ``image_hw``, pixels."""
        if self.fixed_hw is not None:
            return self.fixed_hw
        if self.is_square:
            side = -(-self.imgsz // self.stride) * self.stride
            return side, side
        longest = int(max(image_hw))
        height, width = (self._padded(Fraction(int(side) * self.imgsz, longest)) for side in image_hw)
        return height, width

    def _padded(self, pixels: Fraction) -> int:
        return math.ceil(pixels / self.stride + PADDING) * self.stride


def fit_letterbox(image_hw: tuple[int, int], canvas_hw: tuple[int, int], longest: int | None = None) -> Letterbox:
    """Finds the largest centered fit of an image into a canvas, with a longer side of at most ``longest`` pixels.

    Sizes are rounded up, and an odd pixel of padding is on the right or at the bottom, as in the published evaluations
    of YOLO models.
    """
    height, width = (int(side) for side in image_hw)
    limits = [(canvas_hw[0], height), (canvas_hw[1], width)]
    if longest is not None:
        limits.append((longest, max(height, width)))
    numerator, denominator = min(limits, key=lambda limit: limit[0] / limit[1])
    new_h = min(-(-height * numerator // denominator), canvas_hw[0])
    new_w = min(-(-width * numerator // denominator), canvas_hw[1])
    pad_x = round((canvas_hw[1] - new_w) / 2 - 0.1)
    pad_y = round((canvas_hw[0] - new_h) / 2 - 0.1)
    return Letterbox(new_w, new_h, pad_x, pad_y, new_w / width, new_h / height)


def letterbox(
    image: np.ndarray, canvas_hw: tuple[int, int], fit: Letterbox, out: np.ndarray | None = None
) -> np.ndarray:
    """Resizes ``image`` bilinearly and pads it with gray. Returns (H, W, C), in ``out`` if given."""
    canvas = np.empty((*canvas_hw, image.shape[2]), image.dtype) if out is None else out
    gray = padding_value(canvas.dtype)
    right = fit.pad_x + fit.width
    bottom = fit.pad_y + fit.height
    canvas[: fit.pad_y] = gray
    canvas[bottom:] = gray
    middle = canvas[fit.pad_y : bottom]
    middle[:, : fit.pad_x] = gray
    middle[:, right:] = gray
    if image.shape[:2] == (fit.height, fit.width):
        middle[:, fit.pad_x : right] = image
    else:
        cv2.resize(image, (fit.width, fit.height), dst=middle[:, fit.pad_x : right], interpolation=cv2.INTER_LINEAR)
    return canvas
