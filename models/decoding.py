"""Raw maps to boxes: the geometry that heads, losses and assigners share.

Legend: B images, N cells over all levels (level by level, row by row), R bins of a side's distance, S any shape.
Units: "cells" are multiples of the cell's own stride; the rest is canvas pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST_SIDE = 20_000.0  # strides


def flatten_levels(raw: Sequence[Tensor]) -> Tensor:
    """Maps (B, channels, h, w) of all levels as (B, N, channels), float32 at least. Cheap for channels_last maps."""
    flat = torch.cat([level.permute(0, 2, 3, 1).flatten(1, 2) for level in raw], dim=1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def expected_distances(logits: Tensor) -> Tensor:
    """Mean of each side's distribution over distances 0..R-1 (Li et al. 2020): (*S, R) -> (*S), cells.

    With a single bin there is no distribution, and the output is the distance.
    """
    if logits.shape[-1] == 1:
        return logits.squeeze(-1)
    bins = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return (logits.softmax(-1) * bins).sum(-1)


def distances_to_xyxy(distances: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """Distances (*S, 4) in cells to the left, top, right and bottom side -> xyxy pixels.

    ``centres`` (*S, 2) in cells and ``strides`` (*S, 1) in pixels, as `grid.cell_centres` makes them, broadcast.
    """
    left_top, right_bottom = distances.split(2, -1)
    return torch.cat((centres - left_top, centres + right_bottom), -1) * strides


def anchor_to_cxcywh(logits: Tensor, anchors: Tensor) -> Tensor:
    """Anchor-head outputs (*S, 4) -> boxes cxcywh in cells, the centre relative to the cell's top-left corner.

    The centre reaches half a cell beyond its own, (-0.5, 1.5), and a side is up to 4 times its anchor
    (``anchors`` (*S, 2), cells): YOLOv5's parametrisation.
    """
    doubled = logits.sigmoid() * 2
    return torch.cat((doubled[..., :2] - 0.5, doubled[..., 2:].square() * anchors), dim=-1)


def offsets_to_cxcywh(logits: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """YOLOX's outputs (*S, 4) -> boxes cxcywh in pixels: the centre from the cell's top-left corner in strides, and the
    logarithms of the sides in strides.

    ``centres`` (*S, 2) in cells and ``strides`` (*S, 1) in pixels, as `grid.cell_centres` makes them, broadcast. Sides
    end at `LARGEST_SIDE` strides, beyond any canvas, so that they stay finite.
    """
    offset, size = logits.split(2, -1)
    size = size.clamp(max=math.log(LARGEST_SIDE)).exp()
    return torch.cat((centres - 0.5 + offset, size), -1) * strides


def cxcywh_to_offsets(boxes: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """The outputs (*S, 4) that `offsets_to_cxcywh` would make boxes cxcywh (*S, 4), pixels, of. A side of
    nothing counts as 1e-8 strides, so that its logarithm is finite."""
    centre, size = (boxes / strides).split(2, -1)
    return torch.cat((centre - centres + 0.5, size.clamp(min=1e-8).log()), -1)
