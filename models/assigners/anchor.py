"""The matching of anchors, as in YOLOv5: fixed shapes, no host sync, no gradient.

Legend: M targets, A anchors per cell, P (target, anchor, cell) triples of a level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AnchorMatches(NamedTuple):
    """All (target, anchor, cell) triples of a level that may match; flat in P = M * A * 3."""

    valid: Tensor  # bool (P,), whether they match
    image: Tensor  # int64 (P,)
    anchor: Tensor  # int64 (P,)
    cell: Tensor  # int64 (P,) row-major in the level's grid; a valid index everywhere
    label: Tensor  # int64 (P,)
    boxes_cxcywh_cells: Tensor  # float32 (P, 4), the center relative to the cell's upper left corner


@torch.no_grad()
def match_anchors(targets: Tensor, anchors: Tensor, grid_hw: tuple[int, int], anchor_t: float) -> AnchorMatches:
    """Matches targets to a level's anchors by shape and to its cells by position, as YOLOv5 does.

    An anchor matches if neither side differs from the target's by a factor of ``anchor_t`` or more. Three cells match:
    the one with the target's center, its nearer horizontal and its nearer vertical neighbor, if they are in the grid.
    The other two neighbors are more than half a cell away from the center, further than the head can predict.

    Args:
        targets: (M, 6) as in `Targets`.
        anchors: (A, 2), cells.
        grid_hw: rows and columns of the level.
        anchor_t: an anchor matches if neither side differs by this factor or more.
    """
    height, width = grid_hw
    num_targets = targets.shape[0]
    num_anchors = anchors.shape[0]
    cx, cy = targets[:, 2] * width, targets[:, 3] * height
    target_w, target_h = targets[:, 4] * width, targets[:, 5] * height
    ratio = torch.stack((target_w, target_h), -1)[:, None] / anchors
    fits = torch.maximum(ratio, 1 / ratio).amax(-1) < anchor_t  # (M, A); a side of 0 gives inf, which does not fit

    center_x, center_y = cx.floor().clamp(0, width - 1), cy.floor().clamp(0, height - 1)
    near_x = center_x + torch.where(cx - center_x < 0.5, -1.0, 1.0)
    near_y = center_y + torch.where(cy - center_y < 0.5, -1.0, 1.0)
    x = torch.stack((center_x, near_x, center_x), -1)  # (M, 3)
    y = torch.stack((center_y, center_y, near_y), -1)
    in_grid = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    offset_x, offset_y = cx[:, None] - x, cy[:, None] - y
    boxes = torch.stack((offset_x, offset_y, target_w[:, None].expand_as(x), target_h[:, None].expand_as(x)), -1)

    shape = (num_targets, num_anchors, 3)
    return AnchorMatches(
        valid=(fits[:, :, None] & in_grid[:, None]).flatten(),
        image=targets[:, 0].long()[:, None, None].expand(shape).flatten(),
        anchor=torch.arange(num_anchors, device=targets.device)[:, None].expand(shape).flatten(),
        cell=(y * width + x).long()[:, None].expand(shape).flatten(),
        label=targets[:, 1].long()[:, None, None].expand(shape).flatten(),
        boxes_cxcywh_cells=boxes[:, None].expand(*shape, 4).flatten(0, 2),
    )
