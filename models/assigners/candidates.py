"""What assigners share: candidate cells and conflicts. Fixed shapes, no host sync, no gradient.

Legend: B images, K target slots, N cells over all levels, T candidates per target, S any shape. Boxes are xyxy canvas
pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.boxes import ArrayT

# The floor of a candidate's CIoU, which is below 0 for a target of a few pixels against the large boxes of an untrained
# head. With a floor of 0 such a target would get no cell, and a data set of nothing else would never begin to learn.
# Next to a candidate that overlaps well the floor is negligible: alignment takes its sixth power.
LEAST_OVERLAP = 0.01

_ROUNDS = 4  # of a one-to-one match; only piles of targets on one spot need more


def widened(boxes: ArrayT, finest_stride: float) -> tuple[ArrayT, ArrayT]:
    """Corners (*S, 2) and (*S, 2) of boxes (*S, 4); a side shorter than the finest stride is widened to it about its
    middle.

    On a grid of pitch s every interval of length s contains a center, so every target, however small, has a candidate
    on the finest level. The 1e-3 added is more than rounding can take away.
    """
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    half = ((boxes[..., 2:] - boxes[..., :2]) / 2).clip(finest_stride / 2 + 1e-3)
    return middle - half, middle + half


def resolve_conflicts(cells: Tensor, metric: Tensor, overlap: Tensor, num_cells: int) -> Tensor:
    """Assigns a cell that several targets select to the one with the highest overlap, among equals to the earliest.

    Args:
        cells: int64 (B, K, T).
        metric: (B, K, T), 0 where the cell is not selected.
        overlap: (B, K, T), at least 0: the IoU, or another priority.

    Returns bool (B, K, T): which selections remain, at most one per cell.
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

    In each of `_ROUNDS` rounds the targets without a cell select their best free one, and conflicts are resolved.
    Arguments: see `resolve_conflicts`.

    Returns int64 (B, K, 1), the index of the cell in T, and bool (B, K, 1), whether the target has it.
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
