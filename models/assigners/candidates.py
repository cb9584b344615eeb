"""Steps that the assigners share: candidate cells, conflicts, one-to-one matching.

All have fixed shapes, need no host sync and carry no gradient.

Legend: B images, K target slots, N cells over all levels, T candidates per target, S any shape. Boxes are xyxy canvas
pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.boxes import ArrayT

# Floor of a candidate's CIoU, which is negative for a target of a few pixels and the large boxes of an untrained head.
# With a floor of 0 such a target would get no cell, and a data set of tiny objects would never start to learn. Next to
# a candidate that overlaps well, the floor is negligible: the alignment metric takes the sixth power.
MIN_OVERLAP = 0.01

_MATCH_ROUNDS = 4  # rounds of `match_one_to_one`; only piles of targets on one spot need more
_ROUNDING_MARGIN = 1e-3  # pixels, more than the rounding error of a corner


def widen_to_stride(boxes: ArrayT, finest_stride: float) -> tuple[ArrayT, ArrayT]:
    """Widens sides of boxes (*S, 4) that are shorter than the finest stride to that stride, about their middle.

    On a grid of pitch s every interval of length s contains a center, so every target, however small, has a candidate
    on the finest level.

    Returns the upper left and lower right corners, (*S, 2) each.
    """
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    half = ((boxes[..., 2:] - boxes[..., :2]) / 2).clip(finest_stride / 2 + _ROUNDING_MARGIN)
    return middle - half, middle + half


def resolve_conflicts(cells: Tensor, metric: Tensor, overlap: Tensor, num_cells: int) -> Tensor:
    """Assigns a cell that several targets select to the one with the highest overlap, on a tie to the first.

    Args:
        cells: int64 (B, K, T), the cells that each target selects.
        metric: (B, K, T), 0 where a cell is not selected.
        overlap: (B, K, T), at least 0: the IoU, or another priority.
        num_cells: N.

    Returns bool (B, K, T): the selections that remain, at most one per cell.
    """
    batch, slots, _ = cells.shape
    flat_cells = cells.flatten(1)
    priority = torch.where(metric > 0, overlap, -1.0).flatten(1)
    best = priority.new_full((batch, num_cells), -1.0).scatter_reduce_(1, flat_cells, priority, "amax")
    wins = (priority >= 0) & (priority == best.gather(1, flat_cells))
    target = torch.arange(slots, device=cells.device)[:, None].expand_as(cells).flatten(1)
    target = torch.where(wins, target, slots)
    first = target.new_full((batch, num_cells), slots).scatter_reduce_(1, flat_cells, target, "amin")
    return (wins & (target == first.gather(1, flat_cells))).view_as(cells)


def match_one_to_one(cells: Tensor, metric: Tensor, overlap: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """Assigns one cell to each target: its best by ``metric`` among those that no other target has.

    In each of `_MATCH_ROUNDS` rounds the targets without a cell select their best free one, and conflicts are resolved.
    Arguments: see `resolve_conflicts`.

    Returns int64 (B, K, 1), the cell's index into T, and bool (B, K, 1), whether the target got one.
    """
    chosen = torch.zeros_like(cells[..., :1])
    matched = torch.zeros_like(chosen, dtype=torch.bool)
    taken = metric.new_zeros((cells.shape[0], num_cells))
    for _ in range(_MATCH_ROUNDS):
        free = metric * ~matched * (1 - taken.gather(1, cells.flatten(1)).view_as(metric))
        best = free.argmax(-1, keepdim=True)
        cell = cells.gather(-1, best)
        won = resolve_conflicts(cell, free.gather(-1, best), overlap.gather(-1, best), num_cells)
        chosen = torch.where(won, best, chosen)
        matched = matched | won
        taken.scatter_reduce_(1, cell.flatten(1), won.flatten(1).to(taken), "amax")
    return chosen, matched
