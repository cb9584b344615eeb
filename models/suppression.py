"""Greedy suppression: which candidates stand, given that a box falls to any better box of its group that stands.

Greedy suppression is a chain. Here the chains of many groups are solved at once: groups of about the same size lie in
one padded table, and within a block of a table's columns "a box stands unless a better standing one overlaps it" is
repeated until nothing changes, which takes as many rounds as the longest chain is long and ends in the greedy answer
(Cluster-NMS, Zheng et al. 2021). Only boxes of one group are ever compared, so groups are told apart without shifting
coordinates, which would cost precision: a group's result is the same alone and in any company.

Legend: M candidates, G groups in a table, Q columns of it, T columns in a block, P places for boxes that stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

_SIZES = (1, 8, 32, 128, 1 << 62)  # of groups that share a table; whoever is alone in its group stands
_BLOCK = 256  # columns examined together; changes speed and memory only
_CELLS = 1 << 20  # comparisons made together, likewise


def standing(boxes_xyxy: Tensor, group: Tensor, iou_thres: float, most: int) -> Tensor:
    """Which candidates stand: bool (M,).

    Args:
        boxes_xyxy: float32 (M, 4), of each group the best first.
        group: int64 (M,).
        iou_thres: a box falls to one that it overlaps by more.
        most: of a group, what comes after so many that stand may be reported to have fallen.
    """
    order = group.argsort(stable=True)
    coordinates = boxes_xyxy[order].T.contiguous()
    stands = torch.ones(len(group), dtype=torch.bool, device=group.device)
    for place, filled in _tables(group[order]):
        kept = _stand_in_table(coordinates[:, place], filled, iou_thres, most)
        stands[place[filled]] = kept[filled]
    return torch.empty_like(stands).scatter_(0, order, stands)


def _tables(group: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Sorted groups (M,) as tables with a row for each: places int64 (G, Q) and whether there is one, bool (G, Q)."""
    sizes = group.unique_consecutive(return_counts=True)[1]
    starts = sizes.cumsum(0) - sizes
    on_host = sizes.cpu()
    for low, high in pairwise(_SIZES):
        rows = ((on_host > low) & (on_host <= high)).nonzero()[:, 0]
        if not len(rows):
            continue
        longest = int(on_host[rows].max())
        columns = torch.arange(longest, device=group.device)
        for part in rows.split(max(_CELLS // min(longest, _BLOCK) ** 2, 1)):
            part = part.to(group.device)
            place = starts[part, None] + columns
            yield place.clamp_(max=len(group) - 1), columns < sizes[part, None]


def _stand_in_table(coordinates: Tensor, filled: Tensor, iou_thres: float, most: int) -> Tensor:
    """Which places of a table stand, bool (G, Q), its ``coordinates`` being (4, G, Q)."""
    if filled.shape[1] <= _BLOCK:
        return _stand_in_block(filled, overlaps(coordinates, coordinates, iou_thres))
    groups = filled.shape[0]
    result = torch.zeros_like(filled)
    # One place more than asked for: whatever is past the last one lands there and is not looked at.
    kept = coordinates.new_zeros((4, groups, most + 1))
    counts = torch.zeros(groups, dtype=torch.long, device=filled.device)
    fullest = 0
    for start in range(0, filled.shape[1], _BLOCK):
        block = coordinates[:, :, start : start + _BLOCK]
        stands = filled[:, start : start + _BLOCK]
        if fullest:
            stands = stands & (overlaps(kept[:, :, :fullest], block, iou_thres).sum(1) == 0)
        stands = _stand_in_block(stands, overlaps(block, block, iou_thres))
        result[:, start : start + _BLOCK] = stands
        slot = counts[:, None] + stands.cumsum(1) - 1
        slot = torch.where(stands, slot.clamp(max=most), most)
        kept.scatter_(2, slot.expand(4, -1, -1), block)
        counts = (counts + stands.sum(1)).clamp(max=most)
        fullest, emptiest = int(counts.max()), int(counts.min())
        if emptiest == most:
            break
    return result


def overlaps(a: Tensor, b: Tensor, iou_thres: float) -> Tensor:
    """1 where a box of a, (4, G, P), has an IoU above the threshold with one of b, (4, G, Q), else 0: (G, P, Q).

    Without a division, so that boxes without area overlap nothing. Coordinates come first: a pass over the last axis
    is then a long one.
    """
    ax1, ay1, ax2, ay2 = a[..., None].unbind()
    bx1, by1, bx2, by2 = b[:, :, None].unbind()
    width = torch.minimum(ax2, bx2).sub_(torch.maximum(ax1, bx1)).clamp_(min=0)
    height = torch.minimum(ay2, by2).sub_(torch.maximum(ay1, by1)).clamp_(min=0)
    overlap = width.mul_(height)
    union = ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1)).sub_(overlap)
    return overlap.gt_(union.mul_(iou_thres))


def _stand_in_block(stands: Tensor, suppresses: Tensor) -> Tensor:
    """Greedy suppression in a block: ``stands`` bool (G, T) before it, ``suppresses`` float (G, T, T) row on column."""
    suppresses = suppresses.triu_(1)
    kept = stands
    while True:
        blows = torch.bmm(kept[:, None].to(suppresses.dtype), suppresses)[:, 0]  # whole numbers, so exact
        settled = stands & (blows == 0)
        if torch.equal(settled, kept):
            return kept
        kept = settled
