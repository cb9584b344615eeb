"""Boxes of a data set that are too small for most models, and the remedy."""

from __future__ import annotations

import math

import numpy as np

from data.index.index import DatasetIndex
from utils.logger import get_logger

SMALL_PX = 16.0  # two cells of stride 8, the finest of most models
LARGEST_ADVISED = 2048  # px; with larger images, few GPUs have memory for a batch


def median_side(sides_px: np.ndarray) -> float | None:
    """Returns the median side of boxes; None without boxes."""
    return float(np.median(sides_px)) if sides_px.size else None


def remedy_for_small_boxes(median_side_px: float | None, imgsz: int, stride: int, *, tile: int = 0) -> str | None:
    """Returns the remedy for a median side that is too small for most models; None if it is large enough.

    The remedy is the smallest multiple of ``stride`` at which the side reaches `SMALL_PX`, or (smaller) tiles.
    ``tile``: side of the tiles that the model sees, pixels of the images; 0: it sees whole images.
    """
    if median_side_px is None or median_side_px >= SMALL_PX:
        return None
    larger_imgsz = math.ceil(imgsz * SMALL_PX / median_side_px / stride) * stride
    is_too_large = larger_imgsz > LARGEST_ADVISED
    if tile:
        smaller_tile = max(int(tile * median_side_px / SMALL_PX // stride), 1) * stride
        tiles = f"smaller tiles ('tile: {smaller_tile}' in the data set's YAML)"
        return f"use {tiles}" if is_too_large else f"use --imgsz {larger_imgsz} or more, or {tiles}"
    if is_too_large:
        return "add 'tile: 640' to the data set's YAML, which cuts the images into tiles"
    tiles = f"cut large images into tiles ('tile: {imgsz}' in the data set's YAML)"
    return f"use --imgsz {larger_imgsz} or more, or {tiles}"


def warn_of_small_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> None:
    """Warns if the median training box is too small for most models, with the remedy."""
    median = median_side(np.sqrt(train.sides_at(imgsz).prod(1)))
    remedy = remedy_for_small_boxes(median, imgsz, stride, tile=train.tile)
    if remedy:
        get_logger().warning(
            "half of the training boxes have sides below %.3g px at --imgsz %d, too small for most models: %s",
            median,
            imgsz,
            remedy,
        )
