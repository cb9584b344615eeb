"""Greedy suppression: which candidates stand, given that a box falls to any better box of its group that stands.

Greedy suppression is a chain. Here the chains of many groups are solved at once: groups of about the same size lie in
one padded table, and within a block of a table's columns "a box stands unless a better standing one overlaps it" is
repeated until nothing changes, which takes as many rounds as the longest chain is long and ends in the greedy answer
(Cluster-NMS, Zheng et al. 2021). Only boxes of one group are ever compared, so groups are told apart without shifting
coordinates, which would cost precision: a group's result is the same alone and in any company.

Work is cut to fit the device: a CPU wants what stays in its cache, a GPU few kernels and few values that the host waits
for. The result is the same bits whatever the cut: on every device the same float32 products are compared, one operation
after another, and what is summed are whole numbers.

Legend: M candidates, G groups in a table, Q columns of it, T columns in a block, P places for boxes that stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class _Cut(NamedTuple):
    """Changes speed and memory only."""

    sizes: tuple[int, ...]  # groups up to one of these share no table with larger ones; who is alone in a group stands
    block: int  # columns examined together
    cells: int  # comparisons made together, or twice as many where more than a block is kept; three float32 of each
    rounds: int  # of suppression between looks at whether anything still changes, for which the host waits


_ON_CPU = _Cut(sizes=(1, 8, 32, 128), block=256, cells=1 << 20, rounds=1)
_ON_GPU = _Cut(sizes=(1,), block=512, cells=1 << 25, rounds=4)


def _cut_for(device: torch.device) -> _Cut:
    return _ON_GPU if device.type == "cuda" else _ON_CPU


def standing(boxes_xyxy: Tensor, group: Tensor, groups: int, iou_thres: float, most: int) -> Tensor:
    """Which candidates stand: bool (M,).

    Args:
        boxes_xyxy: float32 (M, 4), of each group the best first.
        group: int64 (M,), from 0 to ``groups`` - 1.
        iou_thres: a box falls to one that it overlaps by more.
        most: of a group, what comes after so many that stand may be reported to have fallen.
    """
    cut = _cut_for(group.device)
    order = group.argsort(stable=True)
    coordinates = boxes_xyxy[order].T.contiguous()
    count = len(group)
    stands = torch.ones(count + 1, dtype=torch.bool, device=group.device)  # the last one is that of no candidate
    for place, filled in _tables(group[order], groups, most, cut):
        kept = _stand_in_table(coordinates[:, place.clamp(max=count - 1)], filled, iou_thres, most, cut)
        stands.scatter_(0, torch.where(filled, place, count).flatten(), kept.flatten())
    return torch.empty_like(stands[:-1]).scatter_(0, order, stands[:-1])


def _tables(group: Tensor, groups: int, most: int, cut: _Cut) -> Iterator[tuple[Tensor, Tensor]]:
    """Sorted groups (M,) as tables with a row for each, the largest first: places int64 (G, Q) and whether there is
    one, bool (G, Q)."""
    edges = torch.searchsorted(group, torch.arange(groups + 1, device=group.device))
    sizes, rows = edges.diff().sort(descending=True)
    starts = edges[rows]
    on_host = sizes.tolist()
    first, end = 0, _larger(on_host, cut.sizes[0])
    while first < end:
        longest = on_host[first]
        alike = _larger(on_host, max(size for size in cut.sizes if size < longest))
        block = min(longest, cut.block)
        compared = block if longest <= block else max(block, min(most, longest) // 2)  # with each column of a block
        last = min(first + max(cut.cells // (block * compared), 1), alike)
        columns = torch.arange(longest, device=group.device)
        yield starts[first:last, None] + columns, columns < sizes[first:last, None]
        first = last


def _larger(descending: list[int], size: int) -> int:
    """How many are larger than ``size``."""
    return bisect_left(descending, -size, key=lambda value: -value)


def _stand_in_table(coordinates: Tensor, filled: Tensor, iou_thres: float, most: int, cut: _Cut) -> Tensor:
    """Which places of a table stand, bool (G, Q), its ``coordinates`` being (4, G, Q)."""
    if filled.shape[1] <= cut.block:
        return _stand_in_block(filled, overlaps(coordinates, coordinates, iou_thres), cut.rounds)
    groups = filled.shape[0]
    result = torch.zeros_like(filled)
    # One place more than asked for: whatever is past the last one lands there and is not looked at.
    kept = coordinates.new_zeros((4, groups, most + 1))
    counts = torch.zeros(groups, dtype=torch.long, device=filled.device)
    fullest = 0
    for start in range(0, filled.shape[1], cut.block):
        block = coordinates[:, :, start : start + cut.block]
        stands = filled[:, start : start + cut.block]
        if fullest:
            stands = stands & (overlaps(kept[:, :, :fullest], block, iou_thres).sum(1) == 0)
        stands = _stand_in_block(stands, overlaps(block, block, iou_thres), cut.rounds)
        result[:, start : start + cut.block] = stands
        slot = counts[:, None] + stands.cumsum(1) - 1
        slot = torch.where(stands, slot.clamp(max=most), most)
        kept.scatter_(2, slot.expand(4, -1, -1), block)
        counts = (counts + stands.sum(1)).clamp(max=most)
        emptiest, fullest = torch.stack(counts.aminmax()).tolist()
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


def _stand_in_block(stands: Tensor, suppresses: Tensor, rounds: int) -> Tensor:
    """Greedy suppression in a block: ``stands`` bool (G, T) before it, ``suppresses`` float (G, T, T) row on column.
    After every so many ``rounds`` it looks whether the last one changed anything."""
    suppresses = suppresses.triu_(1)
    kept = stands
    while True:
        for _ in range(rounds):
            before = kept
            blows = torch.bmm(kept[:, None].to(suppresses.dtype), suppresses)[:, 0]  # whole numbers, so exact
            kept = stands & (blows == 0)
        if torch.equal(kept, before):
            return kept
