"""Task-aligned assignment (TOOD, Feng et al. 2021): fixed shapes, no host sync, no gradient.

Only the few cells inside a target can be assigned to it. The host lists them from the batch's labels, as pairs of a
target and a cell, so no tensor of shape (B, K, N) is needed. The steps, in this order: `list_pairs`, `score_pairs`,
`select_candidates`, `resolve_conflicts`, `normalized_scores`.

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


class Windows(NamedTuple):
    """The cells whose centers are inside each of M targets: a window on each of L levels."""

    corner_cell: np.ndarray  # int64 (M, L) the first cell, numbered over all levels
    size: np.ndarray  # int64 (M, L, 2) numbers of columns and rows; either may be 0
    level_width: np.ndarray  # int64 (L,) columns of the level


class Candidates(NamedTuple):
    """The best candidate cells of each target. An unused slot has the metric and the overlap 0, and any valid cell."""

    cells: Tensor  # int64 (B, K, T)
    metric: Tensor  # (B, K, T), see `alignment`
    overlap: Tensor  # (B, K, T), see `pair_overlap`


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
    windows = _windows_of_boxes(boxes, shapes, strides)
    cell = _cells_of_windows(windows)
    image = targets[:, 0].astype(np.int64)
    pair_count = windows.size.prod(-1).sum(-1)
    slot = image * slots + np.arange(len(image)) - np.searchsorted(image, image)
    pairs = np.zeros((2, max(math.ceil(len(cell) / _BUCKET), 1) * _BUCKET), np.int64)
    pairs[0, : len(cell)] = np.repeat(slot, pair_count)
    pairs[1, : len(cell)] = cell
    ends = np.zeros(images * slots, np.int64)
    ends[slot] = pair_count
    pair_slot, pair_cell = from_host(pairs, device)
    return CandidatePairs(pair_slot, pair_cell, from_host(ends.cumsum(), device))


def _windows_of_boxes(boxes: np.ndarray, shapes: Shapes, strides: tuple[int, ...]) -> Windows:
    """Finds the candidate cells of ``boxes`` (M, 4)."""
    low, high = (corner[:, None] for corner in widen_to_stride(boxes, min(strides)))
    stride = np.array(strides, boxes.dtype)[:, None]
    heights, widths = np.array(shapes).T
    # First and last column and row, (M, L, 2) each. Strides are powers of two, so nothing here rounds.
    first = np.ceil(low / stride - 0.5).clip(0).astype(np.int64)
    last = np.floor(high / stride - 0.5).astype(np.int64)
    size = (np.minimum(last, np.stack((widths, heights), -1) - 1) + 1 - first).clip(0)
    level_start = np.cumsum(heights * widths) - heights * widths
    corner_cell = level_start + first[..., 1] * widths + first[..., 0]
    return Windows(corner_cell, size, widths)


def _cells_of_windows(windows: Windows) -> np.ndarray:
    """Lists the cells of all windows: target after target, then by level, row and column.

    Windows are expanded to rows, and rows to cells: a window of 2 columns and 3 rows gives three rows of two cells.
    """
    columns, rows = windows.size.reshape(-1, 2).T
    window = np.repeat(np.arange(len(rows)), rows)  # window of each row
    level_width = np.broadcast_to(windows.level_width, windows.corner_cell.shape).ravel()
    row_start = windows.corner_cell.ravel()[window] + _ranges(rows) * level_width[window]
    row_length = columns[window]
    return np.repeat(row_start, row_length) + _ranges(row_length)


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Concatenates 0, 1, ..., length - 1 for each of ``lengths``."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


def score_pairs(
    class_logits: Tensor, predicted: Tensor, labels: Tensor, boxes: Tensor, pairs: CandidatePairs
) -> tuple[Tensor, Tensor]:
    """Computes the alignment metric and the CIoU of each pair, (P,) each. Arguments: see `TaskAlignedAssigner`."""
    num_cells = predicted.shape[1]
    image = pairs.slot.div(labels.shape[1], rounding_mode="floor")
    rows = image * num_cells + pairs.cell  # cells numbered over all images
    label = labels.flatten().index_select(0, pairs.slot)
    logits = class_logits.flatten().index_select(0, rows * class_logits.shape[-1] + label)
    overlap = pair_overlap(predicted, boxes, pairs, rows)
    return alignment(logits, overlap), overlap


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


def select_candidates(
    pairs: CandidatePairs, metric: Tensor, overlap: Tensor, *, slots: int, topk: int, num_cells: int
) -> Candidates:
    """Selects the T = ``topk`` pairs of each target with the highest ``metric``.

    Args:
        metric: (P,).
        overlap: (P,).
        slots: K.
        num_cells: N.
    """
    top, exists = best_pairs(pairs, metric, topk)
    exists = exists.view(-1, slots, topk)  # (B, K, T)
    # Unused slots get different cells: additions to one cell, even of 0, would wait for each other.
    spare = torch.arange(slots * topk, device=top.device).view(slots, topk) % num_cells
    return Candidates(
        cells=torch.where(exists, pairs.cell[top].view_as(exists), spare),
        metric=metric[top].view_as(exists) * exists,
        overlap=overlap[top].view_as(exists) * exists,
    )


def normalized_scores(metric: Tensor, overlap: Tensor, is_assigned: Tensor) -> Tensor:
    """Scales the metric (B, K, T) of assigned cells so that a target's best cell gets the target's best IoU (Feng et
    al. 2021, sec. 3.2).

    The maximum has no epsilon added: metrics go down to 1e-15 while boxes fit badly, far below any epsilon. A target
    without cells has only zeros to divide.
    """
    metric = metric * is_assigned
    overlap = overlap * is_assigned
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
        metric, overlap = score_pairs(class_logits, predicted, labels, boxes, pairs)
        candidates = select_candidates(pairs, metric, overlap, slots=slots, topk=topk, num_cells=num_cells)
        if self.one_to_one:
            best, is_assigned = match_one_to_one(*candidates, num_cells)
            candidates = Candidates(*(values.gather(-1, best) for values in candidates))
        else:
            is_assigned = resolve_conflicts(*candidates, num_cells)
        return Assignment(candidates.cells, normalized_scores(candidates.metric, candidates.overlap, is_assigned))
