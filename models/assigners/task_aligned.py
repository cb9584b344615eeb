"""Task-aligned assignment (TOOD, Feng et al. 2021): fixed shapes, no host sync, no gradient.

Only the few cells inside a target can be assigned to it: they are listed as pairs, target by target, and nothing of
shape (B, K, N) is made. The host knows the number of pairs from the batch's labels.

Legend: B images, K target slots, N cells over all levels, L levels, C classes, T candidates per target, S = B * K
slots, P pairs of a target and a candidate cell. Boxes are xyxy canvas pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.assigners.candidates import ALPHA, BETA, LEAST_OVERLAP, match_one_to_one, resolve_conflicts, widened
from models.box_coding import Shapes, grid_levels
from utils.boxes import ArrayT, cxcywh_to_xyxy, iou, scale_boxes

# Images are assigned in groups of at most so many pairs, unless one image alone has more. The limit only affects speed
# and memory: on a CPU the intermediates should stay in the cache, on an accelerator it bounds them (64 MiB each).
_GROUP_PAIRS_CPU = 2**17
_GROUP_PAIRS = 2**24
# Capacities for pairs are multiples of this. On a CPU that makes whole vectors: the rest of a tensor after the last
# whole vector is computed by other instructions, which may round differently. On an accelerator, few different sizes
# let the allocator reuse its blocks.
_BUCKET_CPU = 2**6
_BUCKET = 2**12
# Pixels. For an accelerator, corners are counted this much further out: compilers contract products and sums into
# fused multiply-adds, whose last bits decide whether a center on the edge of a target is inside.
_ROUNDING = 0.01


class Assignment(NamedTuple):
    """The cells of every target. A slot whose score is 0 is unused, and its cell is any valid index. A cell belongs to
    at most one slot with a positive score."""

    cells: Tensor  # int64 (B, K, T)
    scores: Tensor  # float32 (B, K, T) in [0, 1]: what the target's class should score in that cell


class CandidatePairs(NamedTuple):
    """Pairs of a target and a candidate cell, sorted by target, then by cell. Padding pairs have any valid slot and
    cell."""

    slot: Tensor  # int64 (P,) in 0..S-1
    cell: Tensor  # int64 (P,) in 0..N-1, in the slot's image
    ends: Tensor  # int64 (S,) number of pairs of this slot and all before it


class PairGroup(NamedTuple):
    """Images that are assigned together."""

    start: int  # first image
    end: int  # last image + 1
    capacity: int  # for their pairs: P of `list_pairs`


def group_pairs(
    targets: np.ndarray,
    count: int,
    shapes: Shapes,
    strides: tuple[int, ...],
    canvas_hw: tuple[int, int],
    device: torch.device,
) -> list[PairGroup]:
    """Groups of ``count`` images with the capacities that `list_pairs` needs on ``device``. ``targets``: (M, 6) as in
    `Batch`, on the host."""
    on_cpu = device.type == "cpu"
    limit, bucket, margin = (_GROUP_PAIRS_CPU, _BUCKET_CPU, 0.0) if on_cpu else (_GROUP_PAIRS, _BUCKET, _ROUNDING)
    groups, start, total = [], 0, 0
    for image, pairs in enumerate(count_pairs(targets, count, shapes, strides, canvas_hw, margin)):
        if total and total + pairs > limit:
            groups.append(PairGroup(start, image, -(-total // bucket) * bucket))
            start, total = image, 0
        total += pairs
    return [*groups, PairGroup(start, count, max(-(-total // bucket), 1) * bucket)]


def count_pairs(
    targets: np.ndarray,
    count: int,
    shapes: Shapes,
    strides: tuple[int, ...],
    canvas_hw: tuple[int, int],
    margin: float = 0.0,
) -> list[int]:
    """How many pairs `list_pairs` finds in each of ``count`` images; with ``margin``, in pixels, at most. ``targets``:
    (M, 6) as in `Batch`, on the host."""
    boxes = scale_boxes(cxcywh_to_xyxy(targets[:, 2:]), canvas_hw[1], canvas_hw[0])
    low, high = widened(boxes, min(strides))
    low, high = low - margin, high + margin
    last = np.array([[width - 1, height - 1] for height, width in shapes], boxes.dtype)
    _, size = _windows(low[:, None], high[:, None], np.array(strides, boxes.dtype)[:, None], last, np)
    return np.bincount(targets[:, 0].astype(np.int64), size.prod(-1).sum(-1), minlength=count).astype(int).tolist()


def list_pairs(boxes: Tensor, mask: Tensor, shapes: Shapes, strides: tuple[int, ...], capacity: int) -> CandidatePairs:
    """The candidate pairs of the boxes (S, 4) where ``mask`` bool (S,) is set. ``capacity`` is P: at least 1 and at
    least the number of pairs."""
    levels = grid_levels(shapes, strides, boxes.device)
    low, high = widened(boxes, min(strides))
    windows = _windows(low[:, None], high[:, None], levels.strides, levels.last, torch)
    first, size = (t.long() for t in windows)  # (S, L, 2): first column and row, number of columns and rows
    count = size.prod(-1) * mask[:, None]  # (S, L)
    ends = count.flatten().cumsum(0)
    corner = levels.offset + first[..., 1] * levels.columns + first[..., 0]
    rows = torch.stack(
        (ends.view_as(count) - count, size[..., 0].clamp(min=1), corner, levels.columns.expand_as(corner)), -1
    )
    number = torch.arange(capacity, device=boxes.device)
    window = torch.searchsorted(ends, number, right=True).clamp_(max=len(ends) - 1)
    start, columns, corner, pitch = rows.flatten(0, 1).index_select(0, window).unbind(-1)
    offset = number - start  # in the window, row by row
    row = offset.div(columns, rounding_mode="floor")
    cell = (corner + offset + row * (pitch - columns)).clamp_(max=levels.cells - 1)
    slot = window.div(len(shapes), rounding_mode="floor")
    return CandidatePairs(slot, cell, ends[len(shapes) - 1 :: len(shapes)])


def _windows(low: ArrayT, high: ArrayT, strides: ArrayT, last: ArrayT, library: ModuleType) -> tuple[ArrayT, ArrayT]:
    """First cell and number of cells whose centers lie between ``low`` and ``high``, up to the cell ``last``: whole
    numbers as floats. ``library`` is torch or numpy. Strides are powers of two, so nothing here rounds."""
    first = library.clip(library.ceil(low / strides - 0.5), 0, None)
    end = library.minimum(library.floor(high / strides - 0.5), last) + 1
    return first, library.clip(end - first, 0, None)


def alignment(logits: Tensor, overlap: Tensor, alpha: float, beta: float) -> Tensor:
    """score^alpha * CIoU^beta of class logits and CIoUs, (P,) each; the CIoU is at least `LEAST_OVERLAP`."""
    return _power(logits.sigmoid(), alpha).mul_(_power(overlap, beta))


def _power(x: Tensor, exponent: float) -> Tensor:
    """``x ** exponent`` by multiplications where that is possible: pow is many times slower."""
    if exponent == 6:
        return (x * x * x).square()
    return x.sqrt() if exponent == 0.5 else x.pow(exponent)


def best_pairs(pairs: CandidatePairs, metric: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The pairs of highest ``metric`` (P,), at least 0, of each slot, among equals the first ones: int64 (S, T) into P
    with T = ``topk``, and whether there is one, bool (S, T)."""
    real = torch.arange(len(metric), device=metric.device) < pairs.ends[-1]
    # A float32 that is not negative sorts like its bits read as an integer. Slots ascend; metrics descend within a
    # slot.
    slot = torch.where(real, pairs.slot, len(pairs.ends))
    order = ((slot << 32) - metric.float().view(torch.int32)).sort(stable=True).indices
    start = torch.nn.functional.pad(pairs.ends[:-1], (1, 0))
    rank = start[:, None] + torch.arange(topk, device=metric.device)
    return order[rank.clamp(max=len(metric) - 1)], rank < pairs.ends[:, None]


def normalized_scores(metric: Tensor, overlap: Tensor, kept: Tensor) -> Tensor:
    """The metric (B, K, T) scaled so that a target's best cell gets the target's best IoU (Feng et al. 2021, sec. 3.2).

    The maximum has no epsilon added: metrics go down to 1e-15 while boxes fit badly, far below any epsilon. A target
    without cells has only zeros to divide.
    """
    metric, overlap = metric * kept, overlap * kept
    largest = metric.amax(-1, keepdim=True)
    return metric / torch.where(largest > 0, largest, 1.0) * overlap.amax(-1, keepdim=True)


class TaskAlignedAssigner:
    """Task-aligned assignment, with CIoU as the overlap.

    Each target gets its ``topk`` candidates of highest alignment, except those that another target with a higher
    overlap selects too. With ``one_to_one`` a target gets its best candidate that no other target has. Both use the
    same metric, so that a target's one cell is the best of its many: consistent matching (YOLOv10, Wang et al. 2024).
    """

    def __init__(self, *, topk: int, alpha: float = ALPHA, beta: float = BETA, one_to_one: bool = False):
        self.topk, self.alpha, self.beta, self.one_to_one = topk, alpha, beta, one_to_one

    @torch.no_grad()
    def __call__(
        self,
        class_logits: Tensor,
        predicted: Tensor,
        labels: Tensor,
        boxes: Tensor,
        mask: Tensor,
        shapes: Shapes,
        strides: tuple[int, ...],
        groups: Sequence[PairGroup],
    ) -> Assignment:
        """Assigns every image's cells, with T = min(topk, N), or 1.

        Args:
            class_logits: (B, N, C).
            predicted: (B, N, 4) decoded boxes.
            labels: int64 (B, K), any valid class where there is no target.
            boxes: (B, K, 4).
            mask: bool (B, K), where there is a target.
            groups: of all images, from `group_pairs`.
        """
        if len(boxes) == 0:
            none = predicted.new_zeros((*mask.shape, 1 if self.one_to_one else min(self.topk, predicted.shape[1])))
            return Assignment(none.long(), none)
        tensors = (class_logits, predicted, labels, boxes, mask)
        parts = [
            self._top_candidates([t[start:end] for t in tensors], shapes, strides, capacity)
            for start, end, capacity in groups
        ]
        cells, metric, overlap = (torch.cat(column) for column in zip(*parts))
        if self.one_to_one:
            chosen, kept = match_one_to_one(cells, metric, overlap, predicted.shape[1])
            cells, metric, overlap = (t.gather(-1, chosen) for t in (cells, metric, overlap))
        else:
            kept = resolve_conflicts(cells, metric, overlap, predicted.shape[1])
        return Assignment(cells, normalized_scores(metric, overlap, kept))

    def _top_candidates(
        self, tensors: Sequence[Tensor], shapes: Shapes, strides: tuple[int, ...], capacity: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best cells of every target of a group: index, metric and CIoU, (B, K, T) each. ``tensors``: the first
        five arguments of `__call__` for the group."""
        class_logits, predicted, labels, boxes, mask = tensors
        (batch, slots), num_cells = labels.shape, predicted.shape[1]
        boxes = boxes.flatten(0, 1)
        pairs = list_pairs(boxes, mask.flatten(), shapes, strides, capacity)
        row = pairs.slot.div(slots, rounding_mode="floor") * num_cells + pairs.cell  # among all images' cells
        label = labels.flatten().index_select(0, pairs.slot)
        logits = class_logits.flatten().index_select(0, row * class_logits.shape[-1] + label)
        # Coordinates are contiguous, since each is read many times.
        cell_xyxy, target_xyxy = predicted.flatten(0, 1).T.contiguous(), boxes.T.contiguous()
        overlap = iou(cell_xyxy.index_select(1, row).T, target_xyxy.index_select(1, pairs.slot).T, kind="ciou")
        overlap = overlap.clamp_(min=LEAST_OVERLAP)
        metric = alignment(logits, overlap, self.alpha, self.beta)
        top, exists = best_pairs(pairs, metric, min(self.topk, num_cells))
        exists = exists.view(batch, slots, -1)
        cells, metric, overlap = (values[top].view_as(exists) for values in (pairs.cell, metric, overlap))
        # Unused slots get different cells: additions to one cell, even of 0, would wait for each other.
        spare = torch.arange(exists[0].numel(), device=top.device).view_as(exists[0]) % num_cells
        return torch.where(exists, cells, spare), metric * exists, overlap * exists
