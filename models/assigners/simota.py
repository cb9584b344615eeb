"""SimOTA (YOLOX, Ge et al. 2021): each target gets the cheapest cells near it, as many as its largest IoUs add up to.

The steps, in this order: `find_candidates`, `matching_cost`, `dynamic_k`, `select_cheapest`, then `resolve_conflicts`.
All have fixed shapes, need no host sync and carry no gradient.

Legend: B images, K target slots, N cells over all levels, C classes, T cheapest cells of a target. Boxes are xyxy
canvas pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from models.assigners.candidates import match_one_to_one, resolve_conflicts, widen_to_stride
from utils.boxes import iou

MAX_CELLS = 10  # cells per target; dynamic k is the sum of this many of its largest IoUs (OTA, Ge et al. 2021)
CENTER_RADIUS = 2.5  # strides between a target's center and its candidates, along x and along y
OVERLAP_WEIGHT = 3.0  # weight of the IoU's cost relative to the score's
_OUTSIDE_COST = 1e5  # added for cells that are inside the target or near its center, but not both
_MIN_LOG = -100.0  # logarithms of probabilities are clamped here
# Images are assigned in groups so that no (group, K, N) intermediate has more elements: on a CPU it should stay in the
# cache, on an accelerator the limit bounds memory on dense images (64 MiB per intermediate).
_GROUP_ELEMENTS_CPU = 2**17
_GROUP_ELEMENTS = 2**24


class Predictions(NamedTuple):
    """Outputs of the model for every cell."""

    objectness: Tensor  # (B, N, 1) logits
    class_logits: Tensor  # (B, N, C)
    boxes: Tensor  # (B, N, 4)


class TargetSlots(NamedTuple):
    """Targets of each image, padded to K slots."""

    labels: Tensor  # int64 (B, K), any valid class in an empty slot
    boxes: Tensor  # (B, K, 4)
    mask: Tensor  # bool (B, K), False in an empty slot


class Cells(NamedTuple):
    """Cells of all levels."""

    centers: Tensor  # (N, 2) pixels
    strides: Tensor  # (N, 1) pixels
    finest_stride: float


class SimOtaAssignment(NamedTuple):
    """Cells of every target. A cell is assigned to at most one slot."""

    cells: Tensor  # int64 (B, K, T), any valid index where not assigned
    assigned: Tensor  # bool (B, K, T)
    overlap: Tensor  # float32 (B, K, T): IoU of the cell's box and the target


class CandidateMasks(NamedTuple):
    """Cells that each target may get."""

    mask: Tensor  # bool (B, K, N): inside the target or near its center
    preferred: Tensor  # bool (B, K, N): inside the target and near its center


class CheapestCells(NamedTuple):
    """The T = min(`MAX_CELLS`, N) cells of lowest cost for each target, cheapest first."""

    cells: Tensor  # int64 (B, K, T)
    selected: Tensor  # bool (B, K, T): the first k of them, if they are candidates
    cost: Tensor  # float32 (B, K, T), inf where the cell is not a candidate
    overlap: Tensor  # float32 (B, K, T): IoU


def cells_inside(centers: Tensor, boxes: Tensor, finest_stride: float) -> Tensor:
    """Finds the cells whose center is inside a target after `widen_to_stride`: (N, 2), (B, K, 4) -> bool (B, K, N)."""
    low, high = (corner[..., None] for corner in widen_to_stride(boxes, finest_stride))
    x, y = centers.unbind(-1)
    inside = (x >= low[:, :, 0]) & (x <= high[:, :, 0])
    return inside.logical_and_(y >= low[:, :, 1]).logical_and_(y <= high[:, :, 1])


def cells_near_center(cells: Cells, boxes: Tensor) -> Tensor:
    """Finds the cells within `CENTER_RADIUS` strides of a target's center: (B, K, 4) -> bool (B, K, N)."""
    radius = CENTER_RADIUS * cells.strides[:, 0]
    x, y = ((boxes[..., :2] + boxes[..., 2:]) / 2).split(1, -1)
    is_near_x = (x - cells.centers[:, 0]).abs() < radius
    is_near_y = (y - cells.centers[:, 1]).abs() < radius
    return is_near_x.logical_and_(is_near_y)


def find_candidates(objects: TargetSlots, cells: Cells) -> CandidateMasks:
    """Step 1: finds the cells inside each target or near its center."""
    inside = cells_inside(cells.centers, objects.boxes, cells.finest_stride)
    near = cells_near_center(cells, objects.boxes)
    return CandidateMasks((inside | near).logical_and_(objects.mask[..., None]), inside & near)


def score_cost(objectness: Tensor, class_logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the cross-entropy of sqrt(objectness * class score) against the target's class, summed over classes.

    For every target the sum over classes differs in one term only, so no tensor of shape (B, K, N, C) is needed.

    Args: logits (B, N, 1) and (B, N, C), labels int64 (B, K). Returns (B, K, N).
    """
    log_positive = ((logsigmoid(objectness) + logsigmoid(class_logits)) / 2).clamp_(min=_MIN_LOG)
    log_negative = torch.log1p(-log_positive.exp()).clamp_(min=_MIN_LOG)
    index = labels[..., None].expand(-1, -1, class_logits.shape[1])
    target_term = (log_negative - log_positive).transpose(1, 2).gather(1, index)
    return target_term.sub_(log_negative.sum(-1)[:, None]).clamp_(min=0)


def matching_cost(
    predictions: Predictions, objects: TargetSlots, candidates: CandidateMasks, overlap: Tensor
) -> Tensor:
    """Step 2: computes the cost of each cell for each target, (B, K, N), inf where it is not a candidate.

    A low score and a low IoU, ``overlap`` (B, K, N), raise the cost; cells both inside and near the center come first.
    """
    cost = score_cost(predictions.objectness, predictions.class_logits, objects.labels)
    cost -= OVERLAP_WEIGHT * (overlap + 1e-8).log()
    cost = torch.where(candidates.preferred, cost, cost + _OUTSIDE_COST)
    return cost.masked_fill_(~candidates.mask, float("inf"))


def dynamic_k(overlap: Tensor, max_cells: int) -> Tensor:
    """Step 3: counts the cells of each target: the sum of its largest IoUs, rounded down, and at least 1.

    Args: overlap (B, K, N), 0 where a cell is not a candidate. Returns (B, K, 1).
    """
    return overlap.topk(max_cells, dim=-1).values.sum(-1, keepdim=True).floor().clamp(min=1)


def select_cheapest(predictions: Predictions, objects: TargetSlots, cells: Cells) -> CheapestCells:
    """Steps 1 to 4: selects each target's k cells of lowest cost. Several targets may select the same cell."""
    candidates = find_candidates(objects, cells)
    overlap = iou(predictions.boxes[:, None], objects.boxes[:, :, None]).mul_(candidates.mask)
    cost = matching_cost(predictions, objects, candidates, overlap)
    max_cells = min(MAX_CELLS, cells.centers.shape[0])
    count = dynamic_k(overlap, max_cells)
    lowest, chosen = cost.topk(max_cells, dim=-1, largest=False)
    selected = (torch.arange(max_cells, device=chosen.device) < count) & lowest.isfinite()
    return CheapestCells(chosen, selected, lowest, overlap.gather(-1, chosen))


class SimOtaAssigner:
    """Assigns to each target its cells of lowest cost.

    Candidates are the cells inside the target and those near its center. A target gets as many of them as its largest
    IoUs add up to, and at least one. A cell that several targets select goes to the one for which it costs least. With
    ``one_to_one`` a target gets the cheapest cell that no other target has.
    """

    def __init__(self, *, one_to_one: bool = False) -> None:
        self.one_to_one = one_to_one

    @torch.no_grad()
    def __call__(self, predictions: Predictions, objects: TargetSlots, cells: Cells) -> SimOtaAssignment:
        """Assigns the cells of every image; T = min(`MAX_CELLS`, N), or 1 with ``one_to_one``."""
        num_cells = predictions.boxes.shape[1]
        cheapest = self._select_in_groups(predictions, objects, cells)
        cheapness = 1 / (1 + cheapest.cost)
        if self.one_to_one:  # among all candidates, however small the sum of IoUs
            chosen, assigned = match_one_to_one(cheapest.cells, cheapness, cheapness, num_cells)
            return SimOtaAssignment(cheapest.cells.gather(-1, chosen), assigned, cheapest.overlap.gather(-1, chosen))
        assigned = resolve_conflicts(cheapest.cells, cheapest.selected, cheapness, num_cells)
        return SimOtaAssignment(cheapest.cells, assigned, cheapest.overlap)

    def _select_in_groups(self, predictions: Predictions, objects: TargetSlots, cells: Cells) -> CheapestCells:
        """Runs `select_cheapest` on a few images at a time, so that intermediates stay small."""
        batch, slots = objects.labels.shape
        num_cells = predictions.boxes.shape[1]
        limit = _GROUP_ELEMENTS_CPU if predictions.boxes.device.type == "cpu" else _GROUP_ELEMENTS
        group_size = max(1, limit // (slots * max(1, num_cells)))
        groups = []
        for start in range(0, max(batch, 1), group_size):
            images = slice(start, start + group_size)
            group_predictions = Predictions(*(tensor[images] for tensor in predictions))
            group_objects = TargetSlots(*(tensor[images] for tensor in objects))
            groups.append(select_cheapest(group_predictions, group_objects, cells))
        return CheapestCells(*(torch.cat(tensors) for tensors in zip(*groups)))
