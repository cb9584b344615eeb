"""Boxes through a 3x3 matrix: the hull of the corners, clipped to what can be seen, and dropped by one set of rules.

Frames: "source" is continuous pixel coordinates of the source image, where pixel i covers [i, i + 1); "canvas" is the
same on the rendered picture.
"""

from __future__ import annotations

import numpy as np

from utils.boxes import area_xyxy, clip_xyxy

MIN_SIDE_PX = 2.0
MIN_VISIBLE_SHARE = 0.1
MAX_ASPECT = 100.0


def project_points(matrix: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Points (..., 2) through a homogeneous (3, 3) matrix."""
    mapped = points @ matrix[:, :2].T + matrix[:, 2]
    return mapped[..., :2] / mapped[..., 2:]


def are_axis_aligned(matrices: np.ndarray) -> np.ndarray:
    """bool (n,): whether a (3, 3) matrix only scales, mirrors and moves, so that a resize can render it."""
    return ~matrices[:, (0, 1, 2, 2), (1, 0, 0, 1)].any(1)


def project_boxes(matrices: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The axis-aligned hulls (n, 4) of projected boxes, each with a (3, 3) matrix and corners (x, y) of its own."""
    if are_axis_aligned(matrices).all():
        scale, shift = matrices[:, (0, 1), (0, 1)], matrices[:, :2, 2]
        ends = np.stack([low * scale + shift, high * scale + shift]) / matrices[:, 2, 2, None]
        return np.concatenate([ends.min(0), ends.max(0)], 1)
    x, y = (np.stack([low[:, axis], high[:, axis]]) for axis in (0, 1))  # (2, n)
    x, y = x[[0, 1, 1, 0]], y[[0, 0, 1, 1]]
    mapped = [matrices[:, row, 0] * x + matrices[:, row, 1] * y + matrices[:, row, 2] for row in range(3)]
    x, y = mapped[0] / mapped[2], mapped[1] / mapped[2]
    return np.stack([x.min(0), y.min(0), x.max(0), y.max(0)], 1)


def is_worth_keeping(visible_xyxy: np.ndarray, full_area: np.ndarray) -> np.ndarray:
    """Mask (n,) of boxes that are large enough, not too thin, and show enough of their full area."""
    width, height = visible_xyxy[:, 2] - visible_xyxy[:, 0], visible_xyxy[:, 3] - visible_xyxy[:, 1]
    big_enough = (width >= MIN_SIDE_PX) & (height >= MIN_SIDE_PX)
    not_too_thin = np.maximum(width, height) <= MAX_ASPECT * np.minimum(width, height)
    seen_enough = area_xyxy(visible_xyxy) >= MIN_VISIBLE_SHARE * full_area
    return big_enough & not_too_thin & seen_enough


def transform_labels(
    labels: np.ndarray,
    tile: np.ndarray,
    *,
    source_hw: np.ndarray,
    regions: np.ndarray,
    matrices: np.ndarray,
    canvas_hw: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels of T tiles as they appear on the canvas; each moves as it would alone.

    Args:
        labels: float (n, 5) of class, cx, cy, w, h normalised to the source image.
        tile: int (n,), the tile of each.
        source_hw: (T, 2), heights and widths of the tiles' source images, pixels.
        regions: (T, 4), the part of each that is rendered, x1, y1, x2, y2 in source pixels.
        matrices: (T, 3, 3), from source to canvas.
        canvas_hw: (T, 2), sizes of their canvases, pixels, or (2,), the same for all.

    Returns:
        float64 (m, 5) of class, x1, y1, x2, y2 in canvas pixels, of the labels that are kept, in their order; and the
        tiles of these, (m,).
    """
    rows = labels.astype(np.float64)
    side = np.asarray(source_hw, np.float64)[tile, ::-1]
    region, matrix = np.asarray(regions, np.float64)[tile], np.asarray(matrices)[tile]
    centre, half = rows[:, 1:3] * side, rows[:, 3:5] * (side / 2)
    low, high = centre - half, centre + half
    inside = (v.clip(region[:, :2], region[:, 2:]) for v in (low, high))
    height, width = np.broadcast_to(canvas_hw, (len(matrices), 2))[tile].T
    visible = clip_xyxy(project_boxes(matrix, *inside), width, height)
    keep = is_worth_keeping(visible, area_xyxy(project_boxes(matrix, low, high)))
    return np.concatenate([rows[:, :1], visible], 1)[keep], tile[keep]


def to_normalised(labels_xyxy: np.ndarray, canvas_hw: np.ndarray | tuple[int, int]) -> np.ndarray:
    """Rows of class, x1, y1, x2, y2 in canvas pixels to float32 rows of class, cx, cy, w, h normalised to it.

    Args:
        labels_xyxy: (n, 5).
        canvas_hw: (2,), or a canvas for each row (n, 2).
    """
    canvas_wh = np.asarray(canvas_hw)[..., ::-1]
    rows = np.empty((len(labels_xyxy), 5), np.float32)
    rows[:, 0] = labels_xyxy[:, 0]
    rows[:, 1:3] = (labels_xyxy[:, 1:3] + labels_xyxy[:, 3:5]) / 2 / canvas_wh
    rows[:, 3:5] = (labels_xyxy[:, 3:5] - labels_xyxy[:, 1:3]) / canvas_wh
    return rows
