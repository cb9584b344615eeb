"""Places source images on canvases: the region of each that is rendered, and the matrix from source to canvas.

Legend: M patches (images, or crops of them, on a layer). All patches of a batch are computed at once, elementwise, so
that none depends on the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.augment.projection import are_axis_aligned, project_boxes


class Placement(NamedTuple):
    """Positions of patches. For a patch outside the canvas, only ``is_seen`` is valid."""

    region: np.ndarray  # int64 (M, 4): x1, y1, x2, y2 of the rendered region, source pixels
    matrix: np.ndarray  # float64 (M, 3, 3), source to canvas
    is_seen: np.ndarray  # bool (M,)


def fitted_sizes(source_hw: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
    """Returns widths and heights (M, 2), whole numbers, of sources scaled to fit exactly into canvases (M, 2)."""
    gain = np.minimum(canvas_wh[:, 1] / source_hw[:, 0], canvas_wh[:, 0] / source_hw[:, 1])
    return np.maximum(np.rint(source_hw[:, ::-1] * gain[:, None]), 1.0)


def place_patches(
    source_hw: np.ndarray,
    *,
    corners: np.ndarray,
    sizes: np.ndarray,
    frame_wh: np.ndarray,
    frame_to_canvas: np.ndarray,
    canvas_wh: np.ndarray,
) -> Placement:
    """Computes regions and matrices of sources pasted on frames.

    Args:
        source_hw: (M, 2).
        corners, sizes: x, y and width, height (M, 2) on the frame, whole numbers.
        frame_wh: (M, 2).
        frame_to_canvas: (M, 3, 3).
        canvas_wh: (M, 2).
    """
    source_wh = source_hw[:, ::-1].astype(np.float64)
    region = _crop_to_frame(source_wh, corners, sizes, frame_wh)
    gain = sizes / source_wh
    matrix = np.empty_like(frame_to_canvas)
    along_x, along_y, origin = np.moveaxis(frame_to_canvas, 2, 0)  # (M, 3) each
    matrix[:, :, 0] = along_x * gain[:, :1]
    matrix[:, :, 1] = along_y * gain[:, 1:]
    matrix[:, :, 2] = along_x * corners[:, :1] + along_y * corners[:, 1:] + origin
    is_seen = _touches_canvas(region, matrix, canvas_wh)
    aligned = np.flatnonzero(are_axis_aligned(matrix))
    snapped = _snap(region[aligned], matrix[aligned], canvas_wh[aligned])
    region[aligned] = snapped.region
    matrix[aligned] = snapped.matrix
    is_seen[aligned] = snapped.is_seen
    return Placement(region.astype(np.int64), matrix, is_seen)


def _crop_to_frame(source_wh: np.ndarray, corners: np.ndarray, sizes: np.ndarray, frame_wh: np.ndarray) -> np.ndarray:
    """Returns the regions of sources that are on their frames, in whole source pixels, at least one: float64 (M, 4).
    See `place_patches` for the arguments."""
    per_pixel = source_wh / sizes
    low = np.minimum(np.rint((np.maximum(corners, 0) - corners) * per_pixel), source_wh - 1)
    high = np.rint((np.minimum(corners + sizes, frame_wh) - corners) * per_pixel)
    return np.concatenate([low, np.maximum(high, low + 1)], 1)


def _touches_canvas(region: np.ndarray, matrix: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
    """Returns which patches may be visible on their canvases, bool (M,)."""
    x1, y1, x2, y2 = project_boxes(matrix, region[:, :2], region[:, 2:]).T
    return (x1 < canvas_wh[:, 0]) & (y1 < canvas_wh[:, 1]) & (x2 > 0) & (y2 > 0)


def _snap(region: np.ndarray, matrix: np.ndarray, canvas_wh: np.ndarray) -> Placement:
    """Moves the edges of axis-aligned patches, by half a pixel at most, onto canvas pixels.

    A crop of whole source pixels then fills a rectangle of whole canvas pixels, which a resize renders several times
    faster than a warp. Labels use the same matrix, so they stay exactly on the objects.

    An example, along one axis: with gain 0.5 and offset -10.3, a source of 101 pixels covers -10.3 to 40.2 of a canvas
    of 30. Only its pixels 20 to 81 are visible, which cover -0.3 to 30.2. These edges move to 0 and 30, so the new gain
    is 30 / 61.
    """
    gain = matrix[:, (0, 1), (0, 1)]
    offset = matrix[:, :2, 2]
    at_zero = -offset / gain
    at_limit = (canvas_wh - offset) / gain
    low = np.maximum(region[:, :2], np.floor(np.minimum(at_zero, at_limit)))
    high = np.minimum(region[:, 2:], np.ceil(np.maximum(at_zero, at_limit)))
    start = np.rint(gain * low + offset)
    end = np.rint(gain * high + offset)
    is_seen = ((high > low) & (start != end)).all(1)
    snapped = np.zeros_like(matrix)
    new_gain = (end - start) / np.where(high > low, high - low, 1.0)
    snapped[:, (0, 1), (0, 1)] = new_gain
    snapped[:, :2, 2] = start - new_gain * low
    snapped[:, 2, 2] = 1.0
    return Placement(np.concatenate([low, high], 1).astype(np.int64), snapped, is_seen)
