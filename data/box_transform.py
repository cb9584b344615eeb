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


def project_boxes(matrix: np.ndarray, boxes_xyxy: np.ndarray) -> np.ndarray:
    """The axis-aligned hull (n, 4) of the projected corners of boxes (n, 4)."""
    corners = boxes_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
    mapped = project_points(matrix, corners)
    return np.concatenate([mapped.min(1), mapped.max(1)], 1)


def is_worth_keeping(visible_xyxy: np.ndarray, full_area: np.ndarray) -> np.ndarray:
    """Mask (n,) of boxes that are large enough, not too thin, and show enough of their full area."""
    width, height = visible_xyxy[:, 2] - visible_xyxy[:, 0], visible_xyxy[:, 3] - visible_xyxy[:, 1]
    big_enough = (width >= MIN_SIDE_PX) & (height >= MIN_SIDE_PX)
    not_too_thin = np.maximum(width, height) <= MAX_ASPECT * np.minimum(width, height)
    seen_enough = area_xyxy(visible_xyxy) >= MIN_VISIBLE_SHARE * full_area
    return big_enough & not_too_thin & seen_enough


def transform_labels(
    labels: np.ndarray,
    *,
    source_hw: tuple[int, int],
    region_xyxy: tuple[int, int, int, int],
    matrix: np.ndarray,
    canvas_hw: tuple[int, int],
) -> np.ndarray:
    """Labels of one source image as they appear on the canvas.

    Args:
        labels: float (n, 5) of class, cx, cy, w, h normalised to the source image.
        source_hw: size of the source image, pixels.
        region_xyxy: the part of the source image that is rendered, source pixels.
        matrix: (3, 3) from source to canvas.
        canvas_hw: size of the canvas, pixels.

    Returns:
        float64 (m, 5) of class, x1, y1, x2, y2 in canvas pixels, m <= n.
    """
    height, width = source_hw
    centre = labels[:, 1:3].astype(np.float64) * (width, height)
    half = labels[:, 3:5].astype(np.float64) * (width / 2, height / 2)
    boxes = np.concatenate([centre - half, centre + half], 1)
    x1, y1, x2, y2 = region_xyxy
    inside = np.stack(
        [
            boxes[:, 0].clip(x1, x2),
            boxes[:, 1].clip(y1, y2),
            boxes[:, 2].clip(x1, x2),
            boxes[:, 3].clip(y1, y2),
        ],
        1,
    )
    visible = clip_xyxy(project_boxes(matrix, inside), canvas_hw[1], canvas_hw[0])
    keep = is_worth_keeping(visible, area_xyxy(project_boxes(matrix, boxes)))
    return np.concatenate([labels[:, :1].astype(np.float64), visible], 1)[keep]


def to_normalised(labels_xyxy: np.ndarray, canvas_hw: tuple[int, int]) -> np.ndarray:
    """Rows of class, x1, y1, x2, y2 in canvas pixels to float32 rows of class, cx, cy, w, h normalised to it."""
    height, width = canvas_hw
    rows = np.empty((len(labels_xyxy), 5), np.float32)
    rows[:, 0] = labels_xyxy[:, 0]
    rows[:, 1:3] = (labels_xyxy[:, 1:3] + labels_xyxy[:, 3:5]) / 2 / (width, height)
    rows[:, 3:5] = (labels_xyxy[:, 3:5] - labels_xyxy[:, 1:3]) / (width, height)
    return rows
