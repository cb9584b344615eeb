"""Maps points and boxes by homogeneous matrices (3, 3), which act on continuous pixel coordinates.

Boxes are mapped elementwise, for the reason given in `data.augment.transforms`.
"""

from __future__ import annotations

import numpy as np


def project_points(matrix: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Maps points (..., 2) with a homogeneous matrix (3, 3)."""
    mapped = points @ matrix[:, :2].T + matrix[:, 2]
    return mapped[..., :2] / mapped[..., 2:]


def are_axis_aligned(matrices: np.ndarray) -> np.ndarray:
    """Returns whether each (3, 3) matrix only scales, mirrors and moves, so that a resize can render it: bool (n,)."""
    return np.logical_not(matrices[:, (0, 1, 2, 2), (1, 0, 0, 1)].any(1))


def project_boxes(matrices: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Projects boxes, each with a (3, 3) matrix and two corners (x, y); returns their axis-aligned hulls (n, 4)."""
    if are_axis_aligned(matrices).all():
        scale = matrices[:, (0, 1), (0, 1)]
        shift = matrices[:, :2, 2]
        ends = np.stack([low * scale + shift, high * scale + shift]) / matrices[:, 2, 2, None]
        return np.concatenate([ends.min(0), ends.max(0)], 1)
    corner_x = np.stack([low[:, 0], high[:, 0], high[:, 0], low[:, 0]])  # (4, n)
    corner_y = np.stack([low[:, 1], low[:, 1], high[:, 1], high[:, 1]])
    mapped = [matrices[:, row, 0] * corner_x + matrices[:, row, 1] * corner_y + matrices[:, row, 2] for row in range(3)]
    x = mapped[0] / mapped[2]
    y = mapped[1] / mapped[2]
    return np.stack([x.min(0), y.min(0), x.max(0), y.max(0)], 1)
