"""Task-aligned assignment (TOOD, Feng et al. 2021): fixed shapes, no host sync, no gradient.

Only the few cells inside a target can be assigned to it. The host lists them from the batch's labels, as pairs of a
target and a cell, so no tensor of shape (B, K, N) is needed. The steps, in this order: `list_pairs`, `pair_overlap`,
`alignment`, `best_pairs`, `resolve_conflicts`, `normalized_scores`.

Legend: B images, K target slots, N cells over all levels, L levels, C classes, T candidates per target, S = B * K
slots, P pairs of a target and a candidate cell. Boxes are xyxy canvas pixels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.assigners.candidates import MIN_OVERLAP, match_one_to_one, resolve_conflicts, widen_to_stride
from models.box_coding import Shapes, from_host
from utils.boxes import cxcywh_to_xyxy, iou, scale_boxes

# P is a multiple of this. On a CPU every tensor then consists of whole SIMD vectors: a remainder would be computed by
# other instructions, which may round differently. On an accelerator the allocator can reuse its blocks.
_BUCKET = 2**12
_MIN_CANDIDATES = 10  # per target in one-to-one matching: the best cells may belong to other targets


class Assignment(NamedTuple):
    """Cells of every target. A slot with score 0 is unused, and its cell is any valid index. A cell belongs to at most
    one slot with a positive score."""

    cells: Tensor  # int64 (B, K, T)
    scores: Tensor  # float32 (B, K, T) in [0, 1]: target score of the target's class in that cell


class CandidatePairs(NamedTuple):
    """Pairs of a target and a candidate cell, sorted by target, then by cell. Padding comes last."""

    slot: Tensor  # int64 (P,) in 0..S-1
    cell: Tensor  # int64 (P,) in 0..N-1, in the slot's image
    ends: Tensor  # int64 (S,): number of pairs in this slot and all before it


def list_pairs(
    targets: np.ndarray, images: int, slots: int, shapes: Shapes, strides: tuple[int, ...], device: torch.device
) -> CandidatePairs:
    """Lists the candidate pairs on the host, without Python loops over targets or cells.

    Args:
        targets: float (M, 6) as in `Targets`, sorted by image.
        images: B.
        slots: K.
        shapes, strides: grids and strides of the levels.
        device: where the pairs go.
    """
    canvas_h, canvas_w = (side * strides[0] for side in shapes[0])
    boxes = scale_boxes(cxcywh_to_xyxy(targets[:, 2:]), canvas_w, canvas_h)
    low, high = (corner[:, None] for corner in widen_to_stride(boxes, min(strides)))
    stride = np.array(strides, boxes.dtype)[:, None]
    heights, widths = np.array(shapes).T
    # Each target has a window of cells on each level: first column and row, number of columns and rows, (M, L, 2) each.
    # Strides are powers of two, so nothing here rounds.
    first = np.ceil(low / stride - 0.5).clip(0).astype(np.int64)
    last = np.floor(high / stride - 0.5).astype(np.int64)
    size = (np.minimum(last, np.stack((widths, heights), -1) - 1) + 1 - first).clip(0)
    level_start = np.cumsum(heights * widths) - heights * widths
    corner_cell = level_start + first[..., 1] * widths + first[..., 0]
    row_start, row_length = _rows_of_windows(corner_cell.ravel(), size.reshape(-1, 2), np.tile(widths, len(targets)))
    cell = _cells_of_rows(row_start, row_length)

    image = targets[:, 0].astype(np.int64)
    pair_count = size.prod(-1).sum(-1)
    slot = image * slots + np.arange(len(image)) - np.searchsorted(image, image)
    pairs = np.zeros((2, max(math.ceil(len(cell) / _BUCKET), 1) * _BUCKET), np.int64)
    pairs[0, : len(cell)] = np.repeat(slot, pair_count)
    pairs[1, : len(cell)] = cell
    ends = np.zeros(images * slots, np.int64)
    ends[slot] = pair_count
    pair_slot, pair_cell = from_host(pairs, device)
    return CandidatePairs(pair_slot, pair_cell, from_host(ends.cumsum(), device))


def _rows_of_windows(
    corner_cell: np.ndarray, size: np.ndarray, level_width: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Expands W windows of cells to their rows: a window of 2 columns and 3 rows gives three rows of two cells.

    Args:
        corner_cell: int64 (W,) the window's first cell.
        size: int64 (W, 2) numbers of columns and rows; either may be 0.
        level_width: int64 (W,) cells in a row of the window's level.

    Returns the first cell and the number of cells of each row, window after window.
    """
    columns, rows = size.T
    window = np.repeat(np.arange(len(rows)), rows)  # window of each row
    return corner_cell[window] + _ranges(rows) * level_width[window], columns[window]


def _cells_of_rows(row_start: np.ndarray, row_length: np.ndarray) -> np.ndarray:
    """Expands rows of consecutive cells to their cells, row after row."""
    return np.repeat(row_start, row_length) + _ranges(row_length)


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Concatenates 0, 1, ..., length - 1 for each of ``lengths``."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


def pair_overlap(predicted: Tensor, boxes: Tensor, pairs: CandidatePairs, rows: Tensor) -> Tensor:
    """Computes the CIoU of each pair, at least `MIN_OVERLAP`: (P,).

    Args: predicted (B, N, 4), boxes (B, K, 4), rows int64 (P,), the pairs' cells numbered over all images.
    """
    # Coordinates are contiguous, since each is read many times.
    cell_xyxy, target_xyxy = (corners.flatten(0, 1).T.contiguous() for corners in (predicted, boxes))
    overlap = iou(cell_xyxy.index_select(1, rows).T, target_xyxy.index_select(1, pairs.slot).T, kind="ciou")
    return overlap.clamp_(min=MIN_OVERLAP)


def alignment(logits: Tensor, overlap: Tensor) -> Tensor:
    """Computes the paper's metric, score^0.5 * CIoU^6, from class logits and CIoUs, (P,) each.

    Products and roots take a fraction of the time of ``pow``.
    """
    return logits.sigmoid().sqrt().mul_((overlap * overlap * overlap).square())


def best_pairs(pairs: CandidatePairs, metric: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Selects the T = ``topk`` pairs of each slot with the highest ``metric`` (P,), at least 0; on a tie the first.

    Returns int64 (S, T) into P, and bool (S, T), False where a slot has fewer pairs.
    """
    is_pair = torch.arange(len(metric), device=metric.device) < pairs.ends[-1]
    # A non-negative float32 sorts like its bits read as an integer, so one int64 key sorts by slot, ascending, then by
    # metric, descending.
    slot = torch.where(is_pair, pairs.slot, len(pairs.ends))
    order = ((slot << 32) - metric.float().view(torch.int32)).sort(stable=True).indices
    start = torch.nn.functional.pad(pairs.ends[:-1], (1, 0))
    rank = start[:, None] + torch.arange(topk, device=metric.device)
    return order[rank.clamp(max=len(metric) - 1)], rank < pairs.ends[:, None]


def normalized_scores(metric: Tensor, overlap: Tensor, kept: Tensor) -> Tensor:
    """Scales the metric (B, K, T) so that a target's best cell gets the target's best IoU (Feng et al. 2021, sec. 3.2).

    The maximum has no epsilon added: metrics go down to 1e-15 while boxes fit badly, far below any epsilon. A target
    without cells has only zeros to divide.
    """
    metric = metric * kept
    overlap = overlap * kept
    largest = metric.amax(-1, keepdim=True)
    return metric / torch.where(largest > 0, largest, 1.0) * overlap.amax(-1, keepdim=True)


class TaskAlignedAssigner:
    """Assigns to each target its ``topk`` candidates of highest alignment, with CIoU as the overlap.

    A cell that several targets select goes to the one with the highest overlap. With ``one_to_one`` a target gets its
    best candidate that no other target has, of at least `_MIN_CANDIDATES`. Both use the same metric, so that a target's
    one cell is the best of its many: consistent matching (YOLOv10, Wang et al. 2024).
    """

    def __init__(self, *, topk: int, one_to_one: bool = False) -> None:
        self.topk = topk
        self.one_to_one = one_to_one

    @torch.no_grad()
    def __call__(
        self, class_logits: Tensor, predicted: Tensor, labels: Tensor, boxes: Tensor, pairs: CandidatePairs
    ) -> Assignment:
        """Assigns the cells of every image, with T = min(topk, N), or 1 with ``one_to_one``.

        Args:
            class_logits: (B, N, C).
            predicted: (B, N, 4) decoded boxes.
            labels: int64 (B, K), any valid class in an empty slot.
            boxes: (B, K, 4).
            pairs: from `list_pairs`.
        """
        batch, slots = labels.shape
        num_cells = predicted.shape[1]
        topk = max(self.topk, _MIN_CANDIDATES) if self.one_to_one else self.topk
        topk = min(topk, num_cells)
        if batch == 0:
            none = predicted.new_zeros((0, slots, 1 if self.one_to_one else topk))
            return Assignment(none.long(), none)
        # The metric of every pair, (P,).
        rows = pairs.slot.div(slots, rounding_mode="floor") * num_cells + pairs.cell  # cells numbered over all images
        label = labels.flatten().index_select(0, pairs.slot)
        logits = class_logits.flatten().index_select(0, rows * class_logits.shape[-1] + label)
        pair_overlaps = pair_overlap(predicted, boxes, pairs, rows)
        pair_metrics = alignment(logits, pair_overlaps)
        # The best pairs of every target, (B, K, T).
        top, exists = best_pairs(pairs, pair_metrics, topk)
        exists = exists.view(batch, slots, -1)
        # Unused slots get different cells: additions to one cell, even of 0, would wait for each other.
        spare = torch.arange(exists[0].numel(), device=top.device).view_as(exists[0]) % num_cells
        cells = torch.where(exists, pairs.cell[top].view_as(exists), spare)
        metric = pair_metrics[top].view_as(exists) * exists
        overlap = pair_overlaps[top].view_as(exists) * exists
        if self.one_to_one:
            chosen, kept = match_one_to_one(cells, metric, overlap, num_cells)
            cells, metric, overlap = (values.gather(-1, chosen) for values in (cells, metric, overlap))
        else:
            kept = resolve_conflicts(cells, metric, overlap, num_cells)
        return Assignment(cells, normalized_scores(metric, overlap, kept))
