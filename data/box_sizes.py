"""Whether the boxes of a split are large enough for most models."""

from __future__ import annotations

import numpy as np

from data.index.index import DatasetIndex
from utils.logger import get_logger

SMALL_PX = 16.0  # two cells of stride 8, the finest of most models
LARGEST_ADVISED = 2048  # px; larger images leave few models and GPUs a batch


def median_side(sides_px: np.ndarray) -> float | None:
    """None without boxes."""
    return float(np.median(sides_px)) if sides_px.size else None


def size_that_shows(median_side_px: float | None, imgsz: int, stride: int) -> int | None:
    """The smallest multiple of ``stride`` at which the median side reaches `SMALL_PX`; None if ``imgsz`` suffices."""
    if median_side_px is None or median_side_px >= SMALL_PX:
        return None
    return int(-(-imgsz * SMALL_PX / median_side_px // stride)) * stride


def remedy_for_small_boxes(median_side_px: float | None, imgsz: int, stride: int) -> str | None:
    """What to do about a median side that is too small for most models; None if it is large enough."""
    better = size_that_shows(median_side_px, imgsz, stride)
    if better is None:
        return None
    if better > LARGEST_ADVISED:
        return "add 'tile: 640' to the data set's YAML, which cuts the images into tiles"
    return f"use --imgsz {better} or more, or cut large images into tiles ('tile: {imgsz}' in the data set's YAML)"


def warn_of_small_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> None:
    """Warns if the median training box is too small for most models, and says what to do."""
    median = median_side(np.sqrt(train.sides_at(imgsz).prod(1)))
    if remedy := remedy_for_small_boxes(median, imgsz, stride):
        get_logger().warning(
            "half of the training boxes have sides below %.3g px at --imgsz %d, too small for most models: %s",
            median, imgsz, remedy,
        )  # fmt: skip
