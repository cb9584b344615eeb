"""Task-aligned assignment (TOOD, Feng et al. 2021): fixed shapes, no host sync, no gradient.

Only the few cells inside a target can be assigned to it: they are listed as pairs, target by target, and nothing of
shape (B, K, N) is made. The host lists them, from the batch's labels.

Legend: B images, K target slots, N cells over all levels, L levels, C classes, T candidates per target, S = B * K
slots, P pairs of a target and a candidate cell. Boxes are xyxy canvas pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.assigners.candidates import LEAST_OVERLAP, match_one_to_one, resolve_conflicts, widened
from models.box_coding import Shapes, from_host
from utils.boxes import cxcywh_to_xyxy, iou, scale_boxes

# P is a multiple of this. On a CPU that makes whole vectors: the rest of a tensor after the last whole vector is
# computed by other instructions, which may round differently. On an accelerator, few different sizes let the allocator
# reuse its blocks.
_BUCKET = 2**12


class Assignment(NamedTuple):
    """The cells of every target. A slot whose score is 0 is unused, and its cell is any valid index. A cell belongs to
    at most one slot with a positive score."""

    cells: Tensor  # int64 (B, K, T)
    scores: Tensor  # float32 (B, K, T) in [0, 1]: what the target's class should score in that cell


class CandidatePairs(NamedTuple):
    """Pairs of a target and a candidate cell, sorted by target, then by cell. Padding comes last."""

    slot: Tensor  # int64 (P,) in 0..S-1
    cell: Tensor  # int64 (P,) in 0..N-1, in the slot's image
    ends: Tensor  # int64 (S,) number of pairs of this slot and all before it


def list_pairs(
    targets: np.ndarray, images: int, slots: int, shapes: Shapes, strides: tuple[int, ...], device: torch.device
) -> CandidatePairs:
    """The candidate pairs of ``targets``, (M, 6) as in `Batch`, on the host, with ``slots`` for each of ``images``."""
    boxes = scale_boxes(cxcywh_to_xyxy(targets[:, 2:]), shapes[0][1] * strides[0], shapes[0][0] * strides[0])
    low, high = (corner[:, None] for corner in widened(boxes, min(strides)))
    stride = np.array(strides, boxes.dtype)[:, None]
    heights, widths = np.array(shapes).T
    # A target has a window of cells on each level, (M, L, 2): first column and row, number of columns and rows. Strides
    # are powers of two, so nothing here rounds.
    first = np.ceil(low / stride - 0.5).clip(0).astype(np.int64)
    last = np.floor(high / stride - 0.5).astype(np.int64)
    size = (np.minimum(last, np.stack((widths, heights), -1) - 1) + 1 - first).clip(0)
    corner = np.cumsum(heights * widths) - heights * widths + first[..., 1] * widths + first[..., 0]
    columns, rows = size.reshape(-1, 2).T
    window = np.repeat(np.arange(len(rows)), rows)  # of each row of cells
    start = corner.ravel()[window] + _numbers(rows) * np.tile(widths, len(targets))[window]
    cell = np.repeat(start, columns[window]) + _numbers(columns[window])

    image, count = targets[:, 0].astype(np.int64), size.prod(-1).sum(-1)
    slot = image * slots + np.arange(len(image)) - np.searchsorted(image, image)
    pairs = np.zeros((2, max(-(-len(cell) // _BUCKET), 1) * _BUCKET), np.int64)
    pairs[:, : len(cell)] = np.repeat(slot, count), cell
    ends = np.zeros(images * slots, np.int64)
    ends[slot] = count
    return CandidatePairs(*from_host(pairs, device), from_host(ends.cumsum(), device))


def _numbers(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ..., length - 1 for each of ``lengths``, concatenated."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


def alignment(logits: Tensor, overlap: Tensor) -> Tensor:
    """score^0.5 * CIoU^6, the paper's, of class logits and CIoUs, (P,) each. pow would be many times slower."""
    return logits.sigmoid().sqrt().mul_((overlap * overlap * overlap).square())


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

    def __init__(self, *, topk: int, one_to_one: bool = False):
        self.topk, self.one_to_one = topk, one_to_one

    @torch.no_grad()
    def __call__(
        self, class_logits: Tensor, predicted: Tensor, labels: Tensor, boxes: Tensor, pairs: CandidatePairs
    ) -> Assignment:
        """Assigns every image's cells, with T = min(topk, N), or 1.

        Args:
            class_logits: (B, N, C).
            predicted: (B, N, 4) decoded boxes.
            labels: int64 (B, K), any valid class where there is no target.
            boxes: (B, K, 4).
            pairs: from `list_pairs`.
        """
        (batch, slots), num_cells = labels.shape, predicted.shape[1]
        topk = min(self.topk, num_cells)
        if batch == 0:
            none = predicted.new_zeros((0, slots, 1 if self.one_to_one else topk))
            return Assignment(none.long(), none)
        row = pairs.slot.div(slots, rounding_mode="floor") * num_cells + pairs.cell  # among all images' cells
        label = labels.flatten().index_select(0, pairs.slot)
        logits = class_logits.flatten().index_select(0, row * class_logits.shape[-1] + label)
        # Coordinates are contiguous, since each is read many times.
        cell_xyxy, target_xyxy = (corners.flatten(0, 1).T.contiguous() for corners in (predicted, boxes))
        overlap = iou(cell_xyxy.index_select(1, row).T, target_xyxy.index_select(1, pairs.slot).T, kind="ciou")
        overlap = overlap.clamp_(min=LEAST_OVERLAP)
        metric = alignment(logits, overlap)
        top, exists = best_pairs(pairs, metric, topk)
        exists = exists.view(batch, slots, -1)
        cells, metric, overlap = (values[top].view_as(exists) for values in (pairs.cell, metric, overlap))
        # Unused slots get different cells: additions to one cell, even of 0, would wait for each other.
        spare = torch.arange(exists[0].numel(), device=top.device).view_as(exists[0]) % num_cells
        cells, metric, overlap = torch.where(exists, cells, spare), metric * exists, overlap * exists
        if self.one_to_one:
            chosen, kept = match_one_to_one(cells, metric, overlap, num_cells)
            cells, metric, overlap = (t.gather(-1, chosen) for t in (cells, metric, overlap))
        else:
            kept = resolve_conflicts(cells, metric, overlap, num_cells)
        return Assignment(cells, normalized_scores(metric, overlap, kept))
