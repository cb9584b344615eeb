"""What assigners share (candidate cells, conflicts), and the matching of anchors. Fixed shapes, no host sync, no
gradient.

Legend: B images, K target slots, N cells over all levels, T candidates per target, M targets, A anchors of a cell, P
pairs of a target and an anchor in a cell, S any shape.
Frames: boxes are xyxy canvas pixels unless the name says cells (multiples of a level's stride).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from utils.boxes import ArrayT

# The floor of a candidate's CIoU, which is below 0 for a target of a few pixels against the large boxes of an untrained
# head. With a floor of 0 such a target would get no cell, and a data set of nothing else would never begin to learn.
ALPHA, BETA = 0.5, 6.0  # exponents of class score and CIoU in the alignment of a candidate (TOOD, Feng et al. 2021)
# Next to a candidate that overlaps well the floor is negligible: to the power of beta it is 1e-12.
LEAST_OVERLAP = 0.01

_ROUNDS = 4  # of a one-to-one match; only piles of targets on one spot need more


def widened(boxes: ArrayT, finest_stride: float) -> tuple[ArrayT, ArrayT]:
    """Corners (*S, 2) and (*S, 2) of boxes (*S, 4) whose sides are at least the finest stride long.

    A shorter side is widened about its middle. On a grid of pitch s every interval of length s contains a center, so
    every target, however small, has a candidate on the finest level, and targets with both sides at least a stride long
    keep exactly the candidates they have. The 1e-3 added is more than rounding can take away.
    """
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    half = ((boxes[..., 2:] - boxes[..., :2]) / 2).clip(finest_stride / 2 + 1e-3)
    return middle - half, middle + half


def candidate_cells(centers: Tensor, boxes: Tensor, finest_stride: float) -> Tensor:
    """Cells whose center lies in the target, `widened`: (N, 2), (B, K, 4) -> bool (B, K, N)."""
    low, high = (corner[..., None] for corner in widened(boxes, finest_stride))
    x, y = centers.unbind(-1)
    inside = (x >= low[:, :, 0]) & (x <= high[:, :, 0])
    return inside.logical_and_(y >= low[:, :, 1]).logical_and_(y <= high[:, :, 1])


def resolve_conflicts(cells: Tensor, metric: Tensor, overlap: Tensor, num_cells: int) -> Tensor:
    """Assigns a cell that several targets select to the one with the highest overlap, among equals to the earliest.

    Args:
        cells: int64 (B, K, T).
        metric: (B, K, T), 0 where the cell is not selected.
        overlap: (B, K, T), at least 0: the IoU, or another priority.

    Returns:
        bool (B, K, T): which selections remain, at most one per cell.
    """
    batch, slots, _ = cells.shape
    flat = cells.flatten(1)
    priority = torch.where(metric > 0, overlap, -1.0).flatten(1)
    best = priority.new_full((batch, num_cells), -1.0).scatter_reduce_(1, flat, priority, "amax")
    wins = (priority >= 0) & (priority == best.gather(1, flat))
    target = torch.arange(slots, device=cells.device)[:, None].expand_as(cells).flatten(1)
    target = torch.where(wins, target, slots)
    first = target.new_full((batch, num_cells), slots).scatter_reduce_(1, flat, target, "amin")
    return (wins & (target == first.gather(1, flat))).view_as(cells)


def match_one_to_one(cells: Tensor, metric: Tensor, overlap: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """One cell per target, each its best by ``metric`` among those that no other target has.

    In each of `_ROUNDS` rounds the targets without a cell select their best free one, and conflicts are resolved. A
    target that loses its first choice gets its next one, while a top-1 match would leave it without a cell.

    Args:
        cells: int64 (B, K, T).
        metric: (B, K, T), 0 where the cell must not be selected.
        overlap: (B, K, T), as in `resolve_conflicts`.

    Returns:
        int64 (B, K, 1), the index of the cell in T, and bool (B, K, 1), whether the target has it.
    """
    chosen, matched = torch.zeros_like(cells[..., :1]), torch.zeros_like(cells[..., :1], dtype=torch.bool)
    taken = metric.new_zeros((cells.shape[0], num_cells))
    for _ in range(_ROUNDS):
        free = metric * ~matched * (1 - taken.gather(1, cells.flatten(1)).view_as(metric))
        best = free.argmax(-1, keepdim=True)
        cell = cells.gather(-1, best)
        won = resolve_conflicts(cell, free.gather(-1, best), overlap.gather(-1, best), num_cells)
        chosen = torch.where(won, best, chosen)
        matched = matched | won
        taken.scatter_reduce_(1, cell.flatten(1), won.flatten(1).to(taken), "amax")
    return chosen, matched


class AnchorMatches(NamedTuple):
    """Every (target, anchor, cell) triple of a level that may match; flat in P = M * A * 3."""

    valid: Tensor  # bool (P,)
    image: Tensor  # int64 (P,)
    anchor: Tensor  # int64 (P,)
    cell: Tensor  # int64 (P,) row-major in the level's grid; a valid index everywhere
    label: Tensor  # int64 (P,)
    boxes_cxcywh_cells: Tensor  # float32 (P, 4), the center relative to the cell's corner


@torch.no_grad()
def match_anchors(targets: Tensor, anchors: Tensor, grid_hw: tuple[int, int], anchor_t: float) -> AnchorMatches:
    """Matches targets to a level's anchors by shape and to its cells by position (YOLOv5's rule).

    An anchor matches if neither side differs from the target's by a factor of ``anchor_t`` or more. The cell with the
    target's center is matched, and so are its nearer horizontal and its nearer vertical neighbor, if in the grid. The
    other two neighbors lie more than half a cell from the center, further than the head can predict.

    Args:
        targets: float (M, 6): image, class, cx, cy, w, h normalized to the canvas.
        anchors: (A, 2), cells.
        grid_hw: cells down and across.
    """
    height, width = grid_hw
    num_targets, num_anchors = targets.shape[0], anchors.shape[0]
    cx, cy = targets[:, 2] * width, targets[:, 3] * height
    sides = torch.stack((targets[:, 4] * width, targets[:, 5] * height), -1)
    ratio = sides[:, None] / anchors
    fits = torch.maximum(ratio, 1 / ratio).amax(-1) < anchor_t  # (M, A); a side of 0 gives inf, which does not fit

    center_x, center_y = cx.floor().clamp(0, width - 1), cy.floor().clamp(0, height - 1)
    near_x = center_x + torch.where(cx - center_x < 0.5, -1.0, 1.0)
    near_y = center_y + torch.where(cy - center_y < 0.5, -1.0, 1.0)
    x, y = torch.stack((center_x, near_x, center_x), -1), torch.stack((center_y, center_y, near_y), -1)  # (M, 3)
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
