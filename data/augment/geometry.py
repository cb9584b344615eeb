"""Where source images lie on a canvas: for all tiles of a batch at once, in numbers that do not depend on what else is
in it.

Only sums, products and roundings of single numbers, and trigonometry from `math`: the products of small matrices that
linear algebra libraries make may round differently in a longer row. Legend: P pictures, T tiles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from data.augment.boxes import are_axis_aligned, project_boxes
from utils.config.settings import Hyperparameters

MIN_SCALE = 0.05
# The horizon of a perspective draw stays at least this far away, in half-canvases, so that nothing folds over.
HORIZON = 1 / 0.6


class Placed(NamedTuple):
    """Tiles; those that miss the canvas have no meaning but in ``is_seen``."""

    region: np.ndarray  # int64 (T, 4): x1, y1, x2, y2, the part that is rendered, source pixels
    matrix: np.ndarray  # float64 (T, 3, 3), source to canvas
    is_seen: np.ndarray  # bool (T,)


def frames_to_canvas(
    u: np.ndarray, flip_u: np.ndarray, hyp: Hyperparameters, frame_wh: np.ndarray, canvas_wh: np.ndarray
) -> np.ndarray:
    """(P, 3, 3): from the frame (the mosaic's double canvas, or the canvas itself) to the canvas.

    Perspective, rotation and scale, then shear act about the frame's centre, which lands near the canvas' centre; then
    come flips.

    Args:
        u: (P, 8) in [-1, 1]: angle, scale, two shears, two translations, two perspective coefficients.
        flip_u: (P, 2) in [0, 1]: left-right, up-down.
        frame_wh, canvas_wh: (P, 2).
    """
    centre_x, centre_y = (frame_wh / 2).T
    tilt_x, tilt_y = (u[:, 6:8] * hyp.perspective).T
    nearest = np.maximum((np.abs(tilt_x) * centre_x + np.abs(tilt_y) * centre_y) * HORIZON, 1.0)
    tilt_x, tilt_y = tilt_x / nearest, tilt_y / nearest
    angle = np.radians(u[:, 0] * hyp.degrees).tolist()
    slope = np.radians(u[:, 2:4] * hyp.shear).tolist()
    cosine, sine = (np.array([f(a) for a in angle]) for f in (math.cos, math.sin))
    shear_x, shear_y = np.array([(math.tan(a), math.tan(b)) for a, b in slope]).T
    scale = np.maximum(1 + u[:, 1] * hyp.scale, MIN_SCALE)
    matrix = np.empty((len(u), 3, 3))
    matrix[:, 2, 0], matrix[:, 2, 1] = tilt_x, tilt_y
    matrix[:, 2, 2] = 1 - (tilt_x * centre_x + tilt_y * centre_y)
    of_axes = (
        (scale * (cosine - shear_x * sine), scale * (sine + shear_x * cosine)),
        (scale * (shear_y * cosine - sine), scale * (shear_y * sine + cosine)),
    )
    for axis, (along_x, along_y) in enumerate(of_axes):
        limit, probability = canvas_wh[:, axis], (hyp.fliplr, hyp.flipud)[axis]
        target = (0.5 + u[:, 4 + axis] * hyp.translate) * limit
        offset = -(along_x * centre_x + along_y * centre_y)
        row = np.stack([along_x, along_y, offset], 1) + target[:, None] * matrix[:, 2]
        mirrored = (flip_u[:, axis] < probability)[:, None]
        matrix[:, axis] = np.where(mirrored, limit[:, None] * matrix[:, 2] - row, row)
    return matrix


def fitted_sizes(source_hw: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
    """Widths and heights (T, 2), whole numbers, of sources (T, 2) scaled to just fit their canvases (T, 2)."""
    gain = np.minimum(canvas_wh[:, 1] / source_hw[:, 0], canvas_wh[:, 0] / source_hw[:, 1])
    return np.maximum(np.rint(source_hw[:, ::-1] * gain[:, None]), 1.0)


def mosaic_corners(slots: np.ndarray, centres: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Upper left corners (T, 2) on the double canvas; slots run left to right, top to bottom, and meet in a point."""
    before = np.stack([slots % 2 == 0, slots < 2], 1)
    return np.where(before, centres - sizes, centres)


def place_tiles(
    source_hw: np.ndarray,
    corners: np.ndarray,
    sizes: np.ndarray,
    frame_wh: np.ndarray,
    outer: np.ndarray,
    canvas_wh: np.ndarray,
) -> Placed:
    """Sources that lie on frames, seen through ``outer``.

    Args:
        source_hw: (T, 2).
        corners, sizes: x, y and width, height (T, 2) on the frame, whole numbers.
        frame_wh: (T, 2).
        outer: (T, 3, 3), from `frames_to_canvas`.
        canvas_wh: (T, 2).
    """
    source_wh = source_hw[:, ::-1].astype(np.float64)
    per_pixel = source_wh / sizes
    # What the frame's edge cuts off, to whole source pixels; at least one stays.
    low = np.minimum(np.rint((np.maximum(corners, 0) - corners) * per_pixel), source_wh - 1)
    high = np.rint((np.minimum(corners + sizes, frame_wh) - corners) * per_pixel)
    region = np.concatenate([low, np.maximum(high, low + 1)], 1)
    gain = sizes / source_wh
    matrix = np.empty_like(outer)
    matrix[:, :, 0], matrix[:, :, 1] = outer[:, :, 0] * gain[:, :1], outer[:, :, 1] * gain[:, 1:]
    matrix[:, :, 2] = outer[:, :, 0] * corners[:, :1] + outer[:, :, 1] * corners[:, 1:] + outer[:, :, 2]
    aligned = are_axis_aligned(matrix)
    if aligned.all():
        return _snapped(region, matrix, canvas_wh)
    tilted = Placed(region.astype(np.int64), matrix, _touches_canvas(region, matrix, canvas_wh))
    if not aligned.any():
        return tilted
    for part, snapped in zip(tilted, _snapped(region[aligned], matrix[aligned], canvas_wh[aligned])):
        part[aligned] = snapped
    return tilted


def _touches_canvas(region: np.ndarray, matrix: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
    x1, y1, x2, y2 = project_boxes(matrix, region[:, :2], region[:, 2:]).T
    return (x1 < canvas_wh[:, 0]) & (y1 < canvas_wh[:, 1]) & (x2 > 0) & (y2 > 0)


def _snapped(region: np.ndarray, matrix: np.ndarray, canvas_wh: np.ndarray) -> Placed:
    """Tiles with their edges moved (by half a pixel at most) onto canvas pixels.

    A crop of whole source pixels then fills a rectangle of whole canvas pixels, which a resize renders several times
    faster than a warp. Labels use the moved matrix, so they stay exactly on the objects.
    """
    gain, offset = matrix[:, (0, 1), (0, 1)], matrix[:, :2, 2]
    at_zero, at_limit = -offset / gain, (canvas_wh - offset) / gain
    low = np.maximum(region[:, :2], np.floor(np.minimum(at_zero, at_limit)))
    high = np.minimum(region[:, 2:], np.ceil(np.maximum(at_zero, at_limit)))
    start, end = np.rint(gain * low + offset), np.rint(gain * high + offset)
    is_seen = ((high > low) & (start != end)).all(1)
    snapped = np.zeros_like(matrix)
    new_gain = (end - start) / np.where(high > low, high - low, 1.0)
    snapped[:, (0, 1), (0, 1)] = new_gain
    snapped[:, :2, 2] = start - new_gain * low
    snapped[:, 2, 2] = 1.0
    return Placed(np.concatenate([low, high], 1).astype(np.int64), snapped, is_seen)
