"""The labels of training pictures, without their pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from data.augment import SamplePlan
from data.box_transform import to_normalised, transform_labels


def plan_labels(
    plans: Sequence[SamplePlan],
    source_hw: np.ndarray,
    labels_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> list[np.ndarray]:
    """Float32 (n, 5) of each plan: class, cx, cy, w, h normalised to the canvas.

    Args:
        plans: of one canvas size.
        source_hw: int (N, 2) of all source images, for which the plans were drawn.
        labels_of: as `DatasetIndex.labels_of`.
    """
    own = [[tile for picture in plan.pictures for tile in picture.tiles] for plan in plans]
    tiles = [tile for some in own for tile in some]
    if not tiles:
        return [np.zeros((0, 5), np.float32) for _ in plans]
    images = np.array([tile.index for tile in tiles])
    moved, tile = transform_labels(
        *labels_of(images),
        source_hw=source_hw[images],
        regions=np.array([tile.region for tile in tiles]),
        matrices=np.array([tile.matrix for tile in tiles]),
        canvas_hw=plans[0].canvas_hw,
    )
    ends = np.searchsorted(tile, np.cumsum([len(some) for some in own]))
    return np.split(to_normalised(moved, plans[0].canvas_hw), ends[:-1])
