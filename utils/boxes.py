"""Box conversions, clipping, tile windows and the IoU family.

Conversions take a NumPy array or torch tensor of shape (..., 4) and return a new one of the same type. They are linear,
so they hold in any frame (pixels or normalized).
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

TILE_OVERLAP = 0.2  # overlap of neighboring tiles, as a fraction of a tile

ArrayT = TypeVar("ArrayT", np.ndarray, Tensor)


def _stack(*columns: ArrayT) -> ArrayT:
    return torch.stack(columns, -1) if isinstance(columns[0], Tensor) else np.stack(columns, -1)


def _join(first: ArrayT, second: ArrayT) -> ArrayT:
    return torch.cat((first, second), -1) if isinstance(first, Tensor) else np.concatenate((first, second), -1)


def cxcywh_to_xyxy(boxes: ArrayT) -> ArrayT:
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return _join(center - half, center + half)


def xyxy_to_cxcywh(boxes: ArrayT) -> ArrayT:
    low, high = boxes[..., :2], boxes[..., 2:]
    return _join((low + high) / 2, high - low)


def xywh_to_xyxy(boxes: ArrayT) -> ArrayT:
    x, y, w, h = boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]
    return _stack(x, y, x + w, y + h)


def xyxy_to_xywh(boxes: ArrayT) -> ArrayT:
    x1, y1, x2, y2 = boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]
    return _stack(x1, y1, x2 - x1, y2 - y1)


def scale_boxes(boxes: ArrayT, width: float | ArrayT, height: float | ArrayT) -> ArrayT:
    """Multiplies columns 0 and 2 by ``width``, 1 and 3 by ``height``, in any of the layouts above."""
    return _stack(boxes[..., 0] * width, boxes[..., 1] * height, boxes[..., 2] * width, boxes[..., 3] * height)


def clip_xyxy(boxes: ArrayT, width: float | ArrayT, height: float | ArrayT) -> ArrayT:
    """Clips corners to [0, width] x [0, height]; ``width`` and ``height`` broadcast against (...,)."""
    if isinstance(boxes, Tensor):
        max_x, max_y = (torch.as_tensor(side, dtype=boxes.dtype, device=boxes.device) for side in (width, height))
        x1, x2 = (torch.minimum(boxes[..., i].clamp(min=0), max_x) for i in (0, 2))
        y1, y2 = (torch.minimum(boxes[..., i].clamp(min=0), max_y) for i in (1, 3))
    else:
        x1, x2 = (np.clip(boxes[..., i], 0, width) for i in (0, 2))
        y1, y2 = (np.clip(boxes[..., i], 0, height) for i in (1, 3))
    return _stack(x1, y1, x2, y2)


def letterbox_to_original(
    boxes_xyxy: ArrayT, gain_x: float | ArrayT, gain_y: float | ArrayT, pad_x: float | ArrayT, pad_y: float | ArrayT
) -> ArrayT:
    """Converts canvas pixels to original pixels, without clipping. Gains and pads broadcast against (...,)."""
    return _stack(
        (boxes_xyxy[..., 0] - pad_x) / gain_x,
        (boxes_xyxy[..., 1] - pad_y) / gain_y,
        (boxes_xyxy[..., 2] - pad_x) / gain_x,
        (boxes_xyxy[..., 3] - pad_y) / gain_y,
    )


def area_xyxy(boxes: ArrayT) -> ArrayT:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def tile_windows(canvas_hw: tuple[int, int], tile: int, overlap: float) -> list[tuple[int, int, int, int]]:
    """Covers a canvas with square tiles and returns their x1, y1, x2, y2, row by row.

    Neighbors overlap by the fraction ``overlap`` (below 1) of a tile. The last tile of a row or column ends at the
    border, so it can overlap its neighbor by more. No side of the canvas may be shorter than ``tile`` pixels.
    """
    step = max(tile - round(tile * overlap), 1)

    def offsets(side: int) -> list[int]:
        last = side - tile
        return [min(offset, last) for offset in range(0, last + step, step)]

    height, width = canvas_hw
    tops, lefts = offsets(height), offsets(width)
    return [(left, top, left + tile, top + tile) for top in tops for left in lefts]


def iou(a: Tensor, b: Tensor, kind: str = "iou", eps: float = 1e-7) -> Tensor:
    """Computes the elementwise IoU, or a variant of it, of xyxy boxes that broadcast: (..., 4), (..., 4) -> (...).

    ``kind``: "iou"; "giou" (Rezatofighi et al. 2019); "diou" and "ciou" (Zheng et al. 2020). For "ciou" the trade-off
    weight alpha carries no gradient, as in the paper. Raises ValueError for other kinds.
    """
    ax1, ay1, ax2, ay2 = a.unbind(-1)
    bx1, by1, bx2, by2 = b.unbind(-1)
    aw, ah, bw, bh = ax2 - ax1, ay2 - ay1, bx2 - bx1, by2 - by1
    overlap_w = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(min=0)
    overlap_h = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp(min=0)
    overlap = overlap_w * overlap_h
    union = aw * ah + bw * bh - overlap + eps
    result = overlap / union
    if kind == "iou":
        return result
    hull_w = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    hull_h = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    if kind == "giou":
        hull = hull_w * hull_h + eps
        return result - (hull - union) / hull
    if kind not in ("diou", "ciou"):
        raise ValueError(f"unknown IoU kind {kind!r}")
    center_distance = ((bx1 + bx2 - ax1 - ax2) ** 2 + (by1 + by2 - ay1 - ay2) ** 2) / 4
    penalty = center_distance / (hull_w**2 + hull_h**2 + eps)
    if kind == "ciou":
        shape = (4 / math.pi**2) * (torch.atan(bw / (bh + eps)) - torch.atan(aw / (ah + eps))) ** 2
        with torch.no_grad():
            alpha = shape / (shape - result + (1 + eps))
        penalty = penalty + shape * alpha
    return result - penalty
