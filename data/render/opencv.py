"""Renders plans with OpenCV, resampling each source image once, directly into the output canvas.

Integer coordinates mean pixel centers in OpenCV's warps, but pixel edges in plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import cv2
import numpy as np

from data.augment.plan import Layer, Patch, SamplePlan
from data.augment.transforms import project_points
from data.images.decode import resize, resize_area, with_channels
from utils.pixels import RGB8, PixelFormat, padding_value

_POLYGON_BITS = 4  # sub-pixel bits of OpenCV's polygon filler
# Code for cv2.flip, by whether x and y are mirrored.
_FLIP_CODES = {(False, False): None, (True, False): 1, (False, True): 0, (True, True): -1}


def render_plan(
    plan: SamplePlan, load: Callable[[int], np.ndarray], out: np.ndarray | None = None, pixels: PixelFormat = RGB8
) -> np.ndarray:
    """Renders one training image: (H, W, C).

    Args:
        plan: a plan drawn for the sizes of the images that ``load`` returns.
        load: maps an image index to its source image, (h, w, C) in the format ``pixels``.
        out: (H, W, C) to render into and return; None for a new array.
    """
    if out is None:
        out = np.empty((*plan.canvas_hw, pixels.channels), pixels.dtype)
    if len(plan.layers) == 1:
        return _render_layer(plan.layers[0], load, out)
    first, second = (_render_layer(layer, load, np.empty_like(out)) for layer in plan.layers)
    cv2.addWeighted(first, plan.mix, second, 1 - plan.mix, 0, dst=out)
    return out


def _render_layer(layer: Layer, load: Callable[[int], np.ndarray], out: np.ndarray) -> np.ndarray:
    """Renders one layer into ``out``, and returns it. Pixel operations alternate between two buffers."""
    canvas = np.empty_like(out) if layer.operations else out
    other = out
    canvas[:] = padding_value(canvas.dtype)
    for patch in layer.patches:
        draw_patch(patch, load(patch.index), canvas)
    for operation, parameters in layer.operations:
        if operation.apply(canvas, parameters, other) is other:
            canvas, other = other, canvas
    if canvas is not out:
        out[:] = canvas
    return out


def draw_patch(patch: Patch, source: np.ndarray, canvas: np.ndarray) -> None:
    """Paints one patch onto ``canvas`` (H, W, C), in place. Pixels outside the patch do not change."""
    x1, y1, x2, y2 = patch.region
    crop = source[y1:y2, x1:x2]
    (scale_x, skew_x, shift_x), (skew_y, scale_y, shift_y), (tilt_x, tilt_y, _) = patch.matrix.tolist()
    if skew_x or skew_y or tilt_x or tilt_y:
        _warp_into(crop, patch, canvas)
        return
    x_edges = (round(scale_x * x1 + shift_x), round(scale_x * x2 + shift_x))
    y_edges = (round(scale_y * y1 + shift_y), round(scale_y * y2 + shift_y))
    flip_code = _FLIP_CODES[x_edges[1] < x_edges[0], y_edges[1] < y_edges[0]]
    if flip_code is not None:
        crop = with_channels(cv2.flip(crop, flip_code))
    left, right = sorted(x_edges)
    top, bottom = sorted(y_edges)
    height, width = canvas.shape[:2]
    if top >= 0 and left >= 0 and bottom <= height and right <= width:
        resize(crop, right - left, bottom - top, canvas[top:bottom, left:right])
        return
    # An edge is outside the canvas.
    piece = resize(crop, right - left, bottom - top)
    canvas[max(top, 0) : bottom, max(left, 0) : right] = piece[
        max(-top, 0) : height - top, max(-left, 0) : width - left
    ]


def _warp_into(crop: np.ndarray, patch: Patch, canvas: np.ndarray) -> None:
    """Warps the region ``crop`` of a patch into ``canvas``, in place."""
    height, width = crop.shape[:2]
    matrix = patch.matrix @ _shift(*patch.region[:2])
    outline = project_points(matrix, np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64))
    left, top = np.floor(outline.min(0)).clip(0).astype(int).tolist()
    right, bottom = np.ceil(outline.max(0)).clip(None, (canvas.shape[1], canvas.shape[0])).astype(int).tolist()
    if right <= left or bottom <= top:
        return
    crop, matrix = _shrunk(crop, matrix)
    matrix = _shift(-0.5, -0.5) @ (_shift(-left, -top) @ matrix) @ _shift(0.5, 0.5)  # to pixel centers
    size = (right - left, bottom - top)
    if matrix[2, 0] == matrix[2, 1] == 0:
        affine = matrix[:2] / matrix[2, 2]
        piece = cv2.warpAffine(crop, affine, size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    else:
        piece = cv2.warpPerspective(crop, matrix, size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    mask = np.zeros((size[1], size[0]), np.uint8)
    polygon = np.rint((outline - (left, top) - 0.5) * 2**_POLYGON_BITS).astype(np.int32)
    cv2.fillConvexPoly(mask, polygon, 255, shift=_POLYGON_BITS)
    cv2.copyTo(with_channels(piece), mask, canvas[top:bottom, left:right])


def _shrunk(crop: np.ndarray, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the crop and its matrix, reduced by a whole factor if the warp would shrink the crop to half or less."""
    height, width = crop.shape[:2]
    center = np.array([[width / 2, height / 2], [width / 2 + 1, height / 2], [width / 2, height / 2 + 1]])
    origin, along_x, along_y = project_points(matrix, center)
    scale = math.sqrt(abs(float(np.linalg.det(np.stack([along_x - origin, along_y - origin])))))
    factor = int(1 / max(scale, 1e-3))
    if factor < 2:
        return crop, matrix
    small_w = max(width // factor, 1)
    small_h = max(height // factor, 1)
    small = resize_area(crop, (small_w, small_h))
    return small, matrix @ np.diag([width / small_w, height / small_h, 1.0])


def _shift(x: float, y: float) -> np.ndarray:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])
