"""Greedy non-maximum suppression of many groups at once: only a better kept box of the same group suppresses a box.

Groups of similar size are rows of one padded table. In a block of a table's columns, "keep a box unless a better kept
one overlaps it" is repeated until nothing changes. That takes as many rounds as the longest chain of suppressions, and
gives the greedy result (Cluster-NMS, Zheng et al. 2021). Boxes of different groups are never compared, so no
coordinates are shifted to tell groups apart, which would cost precision, and a group's result does not depend on the
other groups.

torchvision.ops.nms is not used: it takes several times as long on batches of many classes, and at an IoU of exactly the
threshold it keeps other boxes, because it compares quotients (benchmarks/LOG.md).

Legend: M boxes, G groups in a table, Q columns of it, T columns in a block, P kept boxes.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor


class TableSizes(NamedTuple):
    """Sizes that change speed and memory only. On a CPU the data should stay in the cache; on a GPU kernel launches and
    host syncs should be few."""

    min_length: float  # shortest group in a table, as a fraction of its longest one
    block: int  # columns compared together
    max_comparisons: int  # at once, or twice as many with several blocks; each takes three float32
    rounds: int  # rounds of suppression between checks for a change, for which the host waits


ON_CPU = TableSizes(min_length=0.25, block=256, max_comparisons=1 << 20, rounds=1)
ON_GPU = TableSizes(min_length=0.0, block=512, max_comparisons=1 << 25, rounds=4)


def sizes_for(device: torch.device) -> TableSizes:
    return ON_GPU if device.type == "cuda" else ON_CPU


def nms_keep(boxes_xyxy: Tensor, group: Tensor, iou_thres: float, max_kept: int) -> Tensor:
    """Selects the boxes to keep.

    Args:
        boxes_xyxy: float32 (M, 4), the best of each group first.
        group: int64 (M,).
        iou_thres: a box is suppressed if its IoU with a kept one is higher.
        max_kept: once a group has this many kept boxes, its later boxes count as suppressed, or may do so.

    Returns bool (M,).
    """
    sizes = sizes_for(group.device)
    order = group.argsort(stable=True)
    coordinates = boxes_xyxy[order].T.contiguous()
    count = len(group)
    _, lengths = group[order].unique_consecutive(return_counts=True)
    starts = lengths.cumsum(0) - lengths
    lengths, rows = lengths.sort(descending=True)
    starts = starts[rows]
    host_lengths = lengths.tolist()
    keep = torch.ones(count + 1, dtype=torch.bool, device=group.device)  # the last entry takes the padding's results
    first = 0
    while first < len(host_lengths) and host_lengths[first] > 1:  # a lone box is kept
        longest = host_lengths[first]
        shortest = max(round(longest * sizes.min_length), 2)
        end_of_similar = bisect_right(host_lengths, -shortest, key=lambda length: -length)
        table = slice(first, min(end_of_similar, first + _rows_in_table(longest, max_kept, sizes)))
        first = table.stop
        columns = torch.arange(longest, device=group.device)
        index = starts[table, None] + columns
        is_box = columns < lengths[table, None]
        kept = _keep_in_table(coordinates[:, index.clamp(max=count - 1)], is_box, iou_thres, max_kept, sizes)
        keep.scatter_(0, torch.where(is_box, index, count).flatten(), kept.flatten())
    return torch.empty_like(keep[:-1]).scatter_(0, order, keep[:-1])


def _rows_in_table(columns: int, max_kept: int, sizes: TableSizes) -> int:
    """Returns how many rows of a table are compared together, at least one. ``columns``: Q."""
    block = min(columns, sizes.block)
    compared = block  # boxes compared with each column of a block: those of the block,
    if columns > block:  # or those kept before, on average half of all that are kept
        compared = max(block, min(max_kept, columns) // 2)
    return max(sizes.max_comparisons // (block * compared), 1)


def _keep_in_table(coordinates: Tensor, is_box: Tensor, iou_thres: float, max_kept: int, sizes: TableSizes) -> Tensor:
    """Selects the boxes of a table to keep, bool (G, Q), from its ``coordinates`` (4, G, Q).

    Longer rows are read in blocks of columns. An example of a row with three columns a block and ``max_kept`` 3, where
    a1 and a2 overlap a, and b1 overlaps b:

        block     kept before   suppressed by kept   within the block   kept after
        a  a1 b   -             -                    a1, by a           a b -
        b1 c  a2  a b -         b1, a2               -                  a b c
        d  e  f   not read, because all rows have ``max_kept`` boxes
    """
    keep = torch.zeros_like(is_box)
    kept = coordinates[:, :, :0]  # (4, G, P), boxes kept in earlier blocks, padded by boxes without area
    counts = torch.zeros_like(is_box[:, 0], dtype=torch.long)
    for start in range(0, is_box.shape[1], sizes.block):
        columns = slice(start, start + sizes.block)
        block = coordinates[:, :, columns]
        candidates = is_box[:, columns] & (counts < max_kept)[:, None]
        if start:
            candidates &= overlaps(kept, block, iou_thres).sum(1) == 0
        block_keep = _keep_in_block(candidates, overlaps(block, block, iou_thres), sizes.rounds)
        keep[:, columns] = block_keep
        if columns.stop >= is_box.shape[1]:
            break
        added = block_keep.sum(1)
        counts += added
        most_added, fewest = torch.stack((added.max(), counts.min())).tolist()
        if fewest >= max_kept:
            break
        slots = block_keep.byte().argsort(dim=1, descending=True, stable=True)[:, :most_added]
        new = block.gather(2, slots.expand(4, -1, -1)) * block_keep.gather(1, slots)
        kept = torch.cat((kept, new), 2)
    return keep


def _keep_in_block(candidates: Tensor, overlap: Tensor, rounds: int) -> Tensor:
    """Suppresses greedily in a block, in several rounds between checks for a change.

    Args: ``candidates`` bool (G, T), ``overlap`` float (G, T, T) from `overlaps`, changed in place.
    """
    overlap = overlap.triu_(1)  # only better boxes suppress
    keep = candidates
    while True:
        for _ in range(rounds):
            previous = keep
            suppressors = torch.bmm(keep[:, None].to(overlap.dtype), overlap)[:, 0]  # small counts, so exact
            keep = candidates & (suppressors == 0)
        if torch.equal(keep, previous):
            return keep


def overlaps(a: Tensor, b: Tensor, iou_thres: float) -> Tensor:
    """Compares boxes of a, (4, G, P), with those of b, (4, G, Q): 1 where the IoU is above the threshold, else 0, as
    float (G, P, Q).

    Nothing is divided, so boxes without area overlap nothing. Coordinates come first, so that the last axis is long.
    """
    overlap, union = overlap_and_union(a[..., None], b[:, :, None])
    return overlap.gt_(union.mul_(iou_thres))


def overlap_and_union(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the areas of intersection and union of boxes (4, ...) that broadcast, as new tensors."""
    ax1, ay1, ax2, ay2 = a.unbind()
    bx1, by1, bx2, by2 = b.unbind()
    width = torch.minimum(ax2, bx2).sub_(torch.maximum(ax1, bx1)).clamp_(min=0)
    height = torch.minimum(ay2, by2).sub_(torch.maximum(ay1, by1)).clamp_(min=0)
    overlap = width.mul_(height)
    return overlap, ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1)).sub_(overlap)
