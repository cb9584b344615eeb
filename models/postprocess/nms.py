"""Greedy non-maximum suppression of many groups at once: only a better kept box of the same group suppresses a box.

Groups of similar size are rows of one padded table. Within a block of a table's columns, "keep a box unless a better
kept one overlaps it" is repeated until nothing changes. That takes as many rounds as the longest chain of suppressions,
and gives the greedy result (Cluster-NMS, Zheng et al. 2021). Boxes of different groups are never compared, so no
coordinates are shifted to tell groups apart, which would cost precision, and a group's result does not depend on the
other groups.

Block and table sizes depend on the device: on a CPU the data should stay in the cache; on a GPU kernel launches and
syncs should be few. They do not change the result.

torchvision.ops.nms is not used: it compares quotients, so at an IoU of exactly the threshold it keeps other boxes, and
it takes several times as long on batches of many classes (benchmarks/LOG.md).

Legend: M candidates, G groups in a table, Q columns of it, T columns in a block, P kept boxes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class TableSizes(NamedTuple):
    """Sizes that change speed and memory only."""

    length_classes: tuple[int, ...]  # groups up to one of these share no table with longer ones; a lone box is kept
    block: int  # columns compared together
    max_comparisons: int  # at once, or twice as many with several blocks; each takes three float32
    rounds: int  # rounds of suppression between checks for a change, for which the host waits


ON_CPU = TableSizes(length_classes=(1, 8, 32, 128), block=256, max_comparisons=1 << 20, rounds=1)
ON_GPU = TableSizes(length_classes=(1,), block=512, max_comparisons=1 << 25, rounds=4)


def sizes_for(device: torch.device) -> TableSizes:
    """Returns the sizes that are fast on ``device``. They do not change the result."""
    return ON_GPU if device.type == "cuda" else ON_CPU


def nms_keep(boxes_xyxy: Tensor, group: Tensor, groups: int, iou_thres: float, max_det: int) -> Tensor:
    """Selects the boxes to keep.

    Args:
        boxes_xyxy: float32 (M, 4), the best of each group first.
        group: int64 (M,), from 0 to ``groups`` - 1.
        groups: the number of groups.
        iou_thres: a box is suppressed if its IoU with a kept one is higher.
        max_det: once a group has this many kept boxes, its later boxes may count as suppressed.

    Returns bool (M,).
    """
    sizes = sizes_for(group.device)
    order = group.argsort(stable=True)
    coordinates = boxes_xyxy[order].T.contiguous()
    count = len(group)
    keep = torch.ones(count + 1, dtype=torch.bool, device=group.device)  # the last entry takes the padding's results
    for index, is_box in _tables(group[order], groups, max_det, sizes):
        kept = _keep_in_table(coordinates[:, index.clamp(max=count - 1)], is_box, iou_thres, max_det, sizes)
        keep.scatter_(0, torch.where(is_box, index, count).flatten(), kept.flatten())
    return torch.empty_like(keep[:-1]).scatter_(0, order, keep[:-1])


def _tables(group: Tensor, groups: int, max_det: int, sizes: TableSizes) -> Iterator[tuple[Tensor, Tensor]]:
    """Arranges the groups of sorted ``group`` (M,) in tables with a row for each, the largest groups first.

    For example, groups of 40, 2, 9, 1 and 33 boxes with sizes of 1, 8 and 32: the first table has the groups of 40 and
    33 boxes as rows of 40 columns, the second has the group of 9, the third the group of 2. The single box has no
    table.

    Yields indices int64 (G, Q) into M, and bool (G, Q), False for padding.
    """
    edges = torch.searchsorted(group, torch.arange(groups + 1, device=group.device))
    lengths, rows = edges.diff().sort(descending=True)
    starts = edges[rows]
    host_lengths = lengths.tolist()
    for first, end in _row_ranges(host_lengths, max_det, sizes):
        columns = torch.arange(host_lengths[first], device=group.device)
        yield starts[first:end, None] + columns, columns < lengths[first:end, None]


def _row_ranges(lengths: list[int], max_det: int, sizes: TableSizes) -> Iterator[tuple[int, int]]:
    """Divides groups of descending ``lengths`` into tables. Yields the first group of each table and the first group
    after it.

    A table ends at the memory limit, or where groups are so much smaller that one of ``sizes.length_classes`` lies
    between: in the example of `_tables`, 40 and 33 boxes are more than 32, and 9 boxes are not.
    """
    first = 0
    end_of_groups = _count_larger(lengths, sizes.length_classes[0])
    while first < end_of_groups:
        longest = lengths[first]
        size_below = max(size for size in sizes.length_classes if size < longest)
        end_of_similar = _count_larger(lengths, size_below)
        end_of_memory = first + _rows_in_table(longest, max_det, sizes)
        end = min(end_of_similar, end_of_memory)
        yield first, end
        first = end


def _rows_in_table(columns: int, max_det: int, sizes: TableSizes) -> int:
    """Returns how many rows of a table are compared together, at least one. ``columns``: Q."""
    block = min(columns, sizes.block)
    compared = block  # boxes compared with each column of a block: those of the block,
    if columns > block:  # or those kept before, on average half of all that are kept
        compared = max(block, min(max_det, columns) // 2)
    return max(sizes.max_comparisons // (block * compared), 1)


def _count_larger(descending: list[int], size: int) -> int:
    """Counts the numbers larger than ``size``."""
    return bisect_left(descending, -size, key=lambda value: -value)


def _keep_in_table(coordinates: Tensor, is_box: Tensor, iou_thres: float, max_det: int, sizes: TableSizes) -> Tensor:
    """Selects the boxes of a table to keep, bool (G, Q), from its ``coordinates`` (4, G, Q).

    Longer rows are read in blocks of columns. An example of a row with three columns a block and ``max_det`` 3, where
    a1 and a2 overlap a, and b1 overlaps b:

        block     kept before   suppressed by kept   within the block   kept after
        a  a1 b   -             -                    a1, by a           a b -
        b1 c  a2  a b -         b1, a2               -                  a b c
        d  e  f   not read, because all rows have ``max_det`` boxes
    """
    longest = is_box.shape[1]
    if longest <= sizes.block:
        return _keep_in_block(is_box, overlaps(coordinates, coordinates, iou_thres), sizes.rounds)
    keep = torch.zeros_like(is_box)
    kept = _KeptBoxes(coordinates, slots=min(max_det, longest))
    for start in range(0, longest, sizes.block):
        columns = slice(start, start + sizes.block)
        block = coordinates[:, :, columns]
        candidates = is_box[:, columns]
        if kept.fullest:
            candidates = candidates & ~kept.suppress(block, iou_thres)
        block_keep = _keep_in_block(candidates, overlaps(block, block, iou_thres), sizes.rounds)
        keep[:, columns] = block_keep
        kept.add(block, block_keep)
        if kept.emptiest == kept.slots:
            break
    return keep


class _KeptBoxes:
    """The boxes kept so far in each row of a table. A row has ``slots``, and fills the first ones.

    An additional last slot takes every box that is not kept, so that one scatter writes a block of all rows: with three
    slots, the blocks of the example in `_keep_in_table` go to the slots 0 3 1 and 3 2 3.
    """

    def __init__(self, coordinates: Tensor, slots: int) -> None:
        """``coordinates``: boxes of the table, (4, G, Q)."""
        groups = coordinates.shape[1]
        self.slots = slots
        self.fullest = 0  # number of boxes in the fullest row, on the host
        self.emptiest = 0
        self._coordinates = coordinates.new_zeros((4, groups, slots + 1))
        self._counts = torch.zeros(groups, dtype=torch.long, device=coordinates.device)

    def suppress(self, block: Tensor, iou_thres: float) -> Tensor:
        """Returns which boxes of a block (4, G, T) overlap a kept one: bool (G, T)."""
        return overlaps(self._coordinates[:, :, : self.fullest], block, iou_thres).sum(1) > 0

    def add(self, block: Tensor, keep: Tensor) -> None:
        """Adds those boxes of a block (4, G, T) that ``keep``, bool (G, T), selects, while there are slots. The host
        waits."""
        slot = self._counts[:, None] + keep.cumsum(1) - 1
        slot = torch.where(keep, slot.clamp(max=self.slots), self.slots)
        self._coordinates.scatter_(2, slot.expand(4, -1, -1), block)
        self._counts = (self._counts + keep.sum(1)).clamp(max=self.slots)
        self.emptiest, self.fullest = torch.stack(self._counts.aminmax()).tolist()


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
