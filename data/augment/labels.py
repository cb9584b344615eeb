"""Maps the labels of source images to the canvases on which plans place the images.

Legend: M patches of all plans, n labels of their images.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from data.augment.plan import SamplePlan
from data.augment.transforms import project_boxes
from utils.boxes import area_xyxy, clip_xyxy

# Boxes are dropped below these limits, or above this aspect.
MIN_VISIBLE_SIDE_PX = 2.0
MIN_VISIBLE_FRACTION = 0.1
MAX_ASPECT = 100.0


def images_of(plans: Sequence[SamplePlan]) -> np.ndarray:
    """Returns the image of each patch of all plans, int64 (M,)."""
    return np.array([patch.index for plan in plans for layer in plan.layers for patch in layer.patches], np.int64)


def place_labels(
    plans: Sequence[SamplePlan], source_hw: np.ndarray, labels: np.ndarray, patch: np.ndarray
) -> list[np.ndarray]:
    """Returns the labels of each plan, float32 (n, 5): class, cx, cy, w, h normalized to the canvas.

    Args:
        source_hw: see `data.augment.plan.SamplePlanner`.
        labels: float32 (n, 5), labels of the images in `images_of`, in that order, normalized to each image.
        patch: int64 (n,), position of each label's image in `images_of`.
    """
    patches_by_plan = [list(chain.from_iterable(layer.patches for layer in plan.layers)) for plan in plans]
    patches = list(chain.from_iterable(patches_by_plan))
    if not patches:
        return [np.zeros((0, 5), np.float32) for _ in plans]
    counts = list(map(len, patches_by_plan))
    canvas_hw = np.repeat([plan.canvas_hw for plan in plans], counts, 0)
    moved, patch_of_moved = transform_labels(
        labels,
        patch,
        source_hw=source_hw[images_of(plans)],
        regions=np.array([p.region for p in patches]),
        matrices=np.array([p.matrix for p in patches]),
        canvas_hw=canvas_hw,
    )
    ends = np.searchsorted(patch_of_moved, np.cumsum(counts))
    return np.split(to_normalized(moved, canvas_hw[patch_of_moved]), ends[:-1])


def transform_labels(
    labels: np.ndarray,
    patch: np.ndarray,
    *,
    source_hw: np.ndarray,
    regions: np.ndarray,
    matrices: np.ndarray,
    canvas_hw: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Maps the labels of M patches to the canvas, as the hulls of the mapped corners, clipped to the canvas.

    The result for a label does not depend on the others.

    Args:
        labels: float (n, 5) of class, cx, cy, w, h normalized to the source image.
        patch: int (n,), patch of each label.
        source_hw: (M, 2), sizes of the patches' source images, pixels.
        regions: (M, 4), rendered region of each patch, x1, y1, x2, y2 in source pixels.
        matrices: (M, 3, 3), from source to canvas.
        canvas_hw: (M, 2), sizes of their canvases, pixels, or (2,), one size for all.

    Returns:
        float64 (m, 5) of class, x1, y1, x2, y2 in canvas pixels, for the kept labels, in their order; and the patch of
        each kept label, (m,).
    """
    rows = labels.astype(np.float64)
    source_wh = np.asarray(source_hw, np.float64)[patch, ::-1]
    region = np.asarray(regions, np.float64)[patch]
    matrix = np.asarray(matrices)[patch]
    center = rows[:, 1:3] * source_wh
    half = rows[:, 3:5] * (source_wh / 2)
    low = center - half
    high = center + half
    region_low = low.clip(region[:, :2], region[:, 2:])
    region_high = high.clip(region[:, :2], region[:, 2:])
    height, width = np.broadcast_to(canvas_hw, (len(matrices), 2))[patch].T
    visible = clip_xyxy(project_boxes(matrix, region_low, region_high), width, height)
    keep = is_worth_keeping(visible, area_xyxy(project_boxes(matrix, low, high)))
    keep |= (rows[:, 0] < 0) & (area_xyxy(visible) > 0)  # keeps any visible piece of an ignore region
    return np.concatenate([rows[:, :1], visible], 1)[keep], patch[keep]


def is_worth_keeping(visible_xyxy: np.ndarray, full_area: np.ndarray) -> np.ndarray:
    """Returns which boxes are large enough, not too thin, and show enough of their full area: bool (n,)."""
    width = visible_xyxy[:, 2] - visible_xyxy[:, 0]
    height = visible_xyxy[:, 3] - visible_xyxy[:, 1]
    big_enough = (width >= MIN_VISIBLE_SIDE_PX) & (height >= MIN_VISIBLE_SIDE_PX)
    not_too_thin = np.maximum(width, height) <= MAX_ASPECT * np.minimum(width, height)
    seen_enough = area_xyxy(visible_xyxy) >= MIN_VISIBLE_FRACTION * full_area
    return big_enough & not_too_thin & seen_enough


def to_normalized(labels_xyxy: np.ndarray, canvas_hw: np.ndarray | tuple[int, int]) -> np.ndarray:
    """Converts class, x1, y1, x2, y2 (n, 5) in canvas pixels to class, cx, cy, w, h normalized, float32 (n, 5).

    ``canvas_hw``: (2,), or (n, 2) for each row.
    """
    canvas_wh = np.asarray(canvas_hw)[..., ::-1]
    rows = np.empty((len(labels_xyxy), 5), np.float32)
    rows[:, 0] = labels_xyxy[:, 0]
    rows[:, 1:3] = (labels_xyxy[:, 1:3] + labels_xyxy[:, 3:5]) / 2 / canvas_wh
    rows[:, 3:5] = (labels_xyxy[:, 3:5] - labels_xyxy[:, 1:3]) / canvas_wh
    return rows
