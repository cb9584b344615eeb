"""Which cells and anchors predict which target in anchor heads: fixed shapes, no host sync, no gradient.

Legend: M targets, A anchors of a cell, P pairs of a target and an anchor in a cell.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AnchorMatches(NamedTuple):
    """Every (target, anchor, cell) triple of a level that may match; flat in P = M * A * 3."""

    valid: Tensor  # bool (P,)
    image: Tensor  # int64 (P,)
    anchor: Tensor  # int64 (P,)
    cell: Tensor  # int64 (P,) row-major in the level's grid; a valid index everywhere
    label: Tensor  # int64 (P,)
    boxes_cxcywh_cells: Tensor  # float32 (P, 4), the centre relative to the cell's corner


@torch.no_grad()
def match_anchors(targets: Tensor, anchors: Tensor, grid_hw: tuple[int, int], anchor_t: float) -> AnchorMatches:
    """Matches targets to a level's anchors by shape and to its cells by position (YOLOv5's rule).

    An anchor matches if neither side differs from the target's by a factor of ``anchor_t`` or more. The cell with the
    target's centre is matched, and so are its nearer horizontal and its nearer vertical neighbour, if in the grid. The
    other two neighbours lie more than half a cell from the centre, further than the head can predict.

    Args:
        targets: float (M, 6): image, class, cx, cy, w, h normalised to the canvas.
        anchors: (A, 2), cells.
        grid_hw: cells down and across.
    """
    height, width = grid_hw
    num_targets, num_anchors = targets.shape[0], anchors.shape[0]
    cx, cy = targets[:, 2] * width, targets[:, 3] * height
    sides = torch.stack((targets[:, 4] * width, targets[:, 5] * height), -1)
    ratio = sides[:, None] / anchors
    fits = torch.maximum(ratio, 1 / ratio).amax(-1) < anchor_t  # (M, A); a side of 0 gives inf, which does not fit

    centre_x, centre_y = cx.floor().clamp(0, width - 1), cy.floor().clamp(0, height - 1)
    near_x = centre_x + torch.where(cx - centre_x < 0.5, -1.0, 1.0)
    near_y = centre_y + torch.where(cy - centre_y < 0.5, -1.0, 1.0)
    x, y = torch.stack((centre_x, near_x, centre_x), -1), torch.stack((centre_y, centre_y, near_y), -1)  # (M, 3)
    in_grid = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    boxes = torch.stack(
        (cx[:, None] - x, cy[:, None] - y, *(side[:, None].expand_as(x) for side in sides.unbind(-1))), -1
    )

    shape = (num_targets, num_anchors, 3)
    return AnchorMatches(
        valid=(fits[:, :, None] & in_grid[:, None]).flatten(),
        image=targets[:, 0].long()[:, None, None].expand(shape).flatten(),
        anchor=torch.arange(num_anchors, device=targets.device)[:, None].expand(shape).flatten(),
        cell=(y * width + x).long()[:, None].expand(shape).flatten(),
        label=targets[:, 1].long()[:, None, None].expand(shape).flatten(),
        boxes_cxcywh_cells=boxes[:, None].expand(*shape, 4).flatten(0, 2),
    )
