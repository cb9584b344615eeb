"""Raw maps to boxes: the geometry that heads, losses and assigners share.

Legend: B images, N cells over all levels (level by level, row by row), R bins of a side's distance, S any shape.
Units: "cells" are multiples of the cell's own stride; the rest is canvas pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten_levels(raw: Sequence[Tensor]) -> Tensor:
    """Maps (B, channels, h, w) of all levels as float32 (B, N, channels). Cheap for channels_last maps."""
    return torch.cat([level.permute(0, 2, 3, 1).flatten(1, 2) for level in raw], dim=1).float()


def cell_centres(raw: Sequence[Tensor], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Centres float32 (N, 2), x then y, in pixels, and each cell's stride (N,), for maps (B, channels, h, w).

    Made from sizes alone, on the maps' device, so nothing is copied from the host.
    """
    centres, cell_strides = [], []
    for level, stride in zip(raw, strides, strict=True):
        height, width = level.shape[-2:]
        x = (torch.arange(width, dtype=torch.float32, device=level.device) + 0.5) * stride
        y = (torch.arange(height, dtype=torch.float32, device=level.device) + 0.5) * stride
        centres.append(torch.stack((x.expand(height, width), y[:, None].expand(height, width)), -1).flatten(0, 1))
        cell_strides.append(torch.full((height * width,), float(stride), device=level.device))
    return torch.cat(centres), torch.cat(cell_strides)


def expected_distances(logits: Tensor) -> Tensor:
    """Mean of each side's distribution over distances 0..R-1 (Li et al. 2020, eq. 5): (*S, R) -> (*S), cells."""
    bins = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return (logits.softmax(-1) * bins).sum(-1)


def distances_to_xyxy(distances: Tensor, centres: Tensor, stride: Tensor) -> Tensor:
    """Distances (*S, 4) in cells to the left, top, right and bottom side -> xyxy pixels.

    ``centres`` (*S, 2) in pixels and ``stride`` (*S) broadcast against ``distances``.
    """
    lengths = distances * stride[..., None]
    return torch.cat((centres - lengths[..., :2], centres + lengths[..., 2:]), dim=-1)


def anchor_to_cxcywh(logits: Tensor, anchors: Tensor) -> Tensor:
    """Anchor-head outputs (*S, 4) -> boxes cxcywh in cells, the centre relative to the cell's top-left corner.

    The centre reaches half a cell beyond its own, (-0.5, 1.5), and a side is up to 4 times its anchor
    (``anchors`` (*S, 2), cells): YOLOv5's parametrisation.
    """
    doubled = logits.sigmoid() * 2
    return torch.cat((doubled[..., :2] - 0.5, doubled[..., 2:].square() * anchors), dim=-1)
