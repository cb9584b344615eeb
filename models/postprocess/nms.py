"""Greedy non-maximum suppression of many groups at once: a box is suppressed by a better kept box of its group alone.

Groups of about the same size are rows of one padded table. Within a block of a table's columns, "keep a box unless a
better kept one overlaps it" is repeated until nothing changes, which takes as many rounds as the longest chain of
suppressions is long and ends in the greedy answer (Cluster-NMS, Zheng et al. 2021). Only boxes of one group are ever
compared, so coordinates are not shifted to tell groups apart, which would cost precision: a group's result does not
depend on the other groups.

Block and table sizes depend on the device: on a CPU the data should stay in the cache, and a GPU should launch few
kernels and rarely make the host wait. They do not change the result.

torchvision.ops.nms is not used because it compares quotients, which at an IoU of exactly the threshold gives other
boxes, and because it takes several times as long on batches of many classes (benchmarks/LOG.md).

Legend: M candidates, G groups in a table, Q columns of it, T columns in a block, P kept boxes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class _TableSizes(NamedTuple):
    """Changes speed and memory only."""

    groups: tuple[int, ...]  # groups up to one of these sizes share no table with larger ones; a single box is kept
    block: int  # columns compared together
    cells: int  # comparisons made together, or twice as many with several blocks; three float32 of each
    rounds: int  # of suppression between checks for a change, for which the host waits


_ON_CPU = _TableSizes(groups=(1, 8, 32, 128), block=256, cells=1 << 20, rounds=1)
_ON_GPU = _TableSizes(groups=(1,), block=512, cells=1 << 25, rounds=4)


def _sizes_for(device: torch.device) -> _TableSizes:
    return _ON_GPU if device.type == "cuda" else _ON_CPU


def nms_keep(boxes_xyxy: Tensor, group: Tensor, groups: int, iou_thres: float, max_det: int) -> Tensor:
    """Which candidates are kept: bool (M,).

    Args:
        boxes_xyxy: float32 (M, 4), of each group the best first.
        group: int64 (M,), from 0 to ``groups`` - 1.
        max_det: once a group has this many kept boxes, its later boxes may be reported as suppressed.
    """
    sizes = _sizes_for(group.device)
    order = group.argsort(stable=True)
    coordinates = boxes_xyxy[order].T.contiguous()
    count = len(group)
    keep = torch.ones(count + 1, dtype=torch.bool, device=group.device)  # the last entry takes the padding's results
    for index, is_box in _tables(group[order], groups, max_det, sizes):
        kept = _keep_in_table(coordinates[:, index.clamp(max=count - 1)], is_box, iou_thres, max_det, sizes)
        keep.scatter_(0, torch.where(is_box, index, count).flatten(), kept.flatten())
    return torch.empty_like(keep[:-1]).scatter_(0, order, keep[:-1])


def _tables(group: Tensor, groups: int, max_det: int, sizes: _TableSizes) -> Iterator[tuple[Tensor, Tensor]]:
    """Sorted groups (M,) as tables with a row for each, the largest first: indices int64 (G, Q) into M, and bool (G,
    Q), False for padding."""
    edges = torch.searchsorted(group, torch.arange(groups + 1, device=group.device))
    lengths, rows = edges.diff().sort(descending=True)
    starts = edges[rows]
    on_host = lengths.tolist()
    first, end = 0, _count_larger(on_host, sizes.groups[0])
    while first < end:
        longest = on_host[first]
        similar = _count_larger(on_host, max(size for size in sizes.groups if size < longest))
        block = min(longest, sizes.block)
        compared = block if longest <= block else max(block, min(max_det, longest) // 2)  # with each column of a block
        last = min(first + max(sizes.cells // (block * compared), 1), similar)
        columns = torch.arange(longest, device=group.device)
        yield starts[first:last, None] + columns, columns < lengths[first:last, None]
        first = last


def _count_larger(descending: list[int], size: int) -> int:
    """How many are larger than ``size``."""
    return bisect_left(descending, -size, key=lambda value: -value)


def _keep_in_table(coordinates: Tensor, is_box: Tensor, iou_thres: float, max_det: int, sizes: _TableSizes) -> Tensor:
    """Which boxes of a table are kept, bool (G, Q), from its ``coordinates`` (4, G, Q)."""
    if is_box.shape[1] <= sizes.block:
        return _keep_in_block(is_box, overlaps(coordinates, coordinates, iou_thres), sizes.rounds)
    groups, longest = is_box.shape
    max_det = min(max_det, longest)
    keep = torch.zeros_like(is_box)
    kept = coordinates.new_zeros((4, groups, max_det + 1))  # the last column takes what is not needed
    counts = torch.zeros(groups, dtype=torch.long, device=is_box.device)
    fullest = 0
    for start in range(0, is_box.shape[1], sizes.block):
        block = coordinates[:, :, start : start + sizes.block]
        block_keep = is_box[:, start : start + sizes.block]
        if fullest:
            block_keep = block_keep & (overlaps(kept[:, :, :fullest], block, iou_thres).sum(1) == 0)
        block_keep = _keep_in_block(block_keep, overlaps(block, block, iou_thres), sizes.rounds)
        keep[:, start : start + sizes.block] = block_keep
        slot = counts[:, None] + block_keep.cumsum(1) - 1
        slot = torch.where(block_keep, slot.clamp(max=max_det), max_det)
        kept.scatter_(2, slot.expand(4, -1, -1), block)
        counts = (counts + block_keep.sum(1)).clamp(max=max_det)
        emptiest, fullest = torch.stack(counts.aminmax()).tolist()
        if emptiest == max_det:
            break
    return keep


def overlaps(a: Tensor, b: Tensor, iou_thres: float) -> Tensor:
    """1 where a box of a, (4, G, P), has an IoU above the threshold with one of b, (4, G, Q), else 0: (G, P, Q).

    There is no division, so boxes without area overlap nothing. Coordinates come first, which makes the last axis long.
    """
    overlap, union = overlap_and_union(a[..., None], b[:, :, None])
    return overlap.gt_(union.mul_(iou_thres))


def overlap_and_union(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Areas of boxes (4, ...), of any shapes that broadcast; new tensors."""
    ax1, ay1, ax2, ay2 = a.unbind()
    bx1, by1, bx2, by2 = b.unbind()
    width = torch.minimum(ax2, bx2).sub_(torch.maximum(ax1, bx1)).clamp_(min=0)
    height = torch.minimum(ay2, by2).sub_(torch.maximum(ay1, by1)).clamp_(min=0)
    overlap = width.mul_(height)
    return overlap, ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1)).sub_(overlap)


def _keep_in_block(candidates: Tensor, overlap: Tensor, rounds: int) -> Tensor:
    """Greedy suppression in a block: ``candidates`` bool (G, T), ``overlap`` float (G, T, T) as by `overlaps`. It
    checks for a change every ``rounds``."""
    overlap = overlap.triu_(1)
    keep = candidates
    while True:
        for _ in range(rounds):
            before = keep
            suppressed_by = torch.bmm(keep[:, None].to(overlap.dtype), overlap)[:, 0]  # counts, so exact
            keep = candidates & (suppressed_by == 0)
        if torch.equal(keep, before):
            return keep
