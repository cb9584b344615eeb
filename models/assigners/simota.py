"""SimOTA (YOLOX, Ge et al. 2021): the cheapest cells near each target, as many as its largest IoUs add up to. Fixed
shapes, no host sync, no gradient.

Legend: B images, K target slots, N cells over all levels, C classes, T candidates per target. Boxes are xyxy canvas
pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from models.assigners.candidates import match_one_to_one, resolve_conflicts, widened
from utils.boxes import iou

MOST_CELLS = 10  # a target; it gets as many as the sum of this many of its largest IoUs (OTA, Ge et al. 2021)
CENTER_RADIUS = 2.5  # strides between a target's middle and its candidates, by x and by y
OVERLAP_WEIGHT = 3.0  # of the IoU's cost, relative to the score's
_OUTSIDE = 1e5  # added to the cost of cells that are only in the target or only near its middle
_LEAST_LOG = -100.0  # logarithms of probabilities are clamped here
# Images are assigned in groups, so that no (group, K, N) intermediate exceeds this many elements: on a CPU they should
# stay in the cache, on an accelerator the limit bounds memory (64 MiB each) on dense images.
_GROUP_ELEMENTS_CPU = 2**17
_GROUP_ELEMENTS = 2**24


class Predictions(NamedTuple):
    """What the model predicts in each cell."""

    objectness: Tensor  # (B, N, 1) logits
    class_logits: Tensor  # (B, N, C)
    boxes: Tensor  # (B, N, 4)


class Objects(NamedTuple):
    """The targets of each image."""

    labels: Tensor  # int64 (B, K), any valid class where there is no target
    boxes: Tensor  # (B, K, 4)
    mask: Tensor  # bool (B, K), where there is a target


class Cells(NamedTuple):
    """The cells of all levels."""

    centers: Tensor  # (N, 2) pixels
    strides: Tensor  # (N, 1) pixels
    finest_stride: float


class SimOtaAssignment(NamedTuple):
    """The cells of every target. A cell is assigned to at most one slot."""

    cells: Tensor  # int64 (B, K, T), any valid index where it is not assigned
    assigned: Tensor  # bool (B, K, T)
    overlap: Tensor  # float32 (B, K, T): IoU of the cell's box with the target


def candidate_cells(centers: Tensor, boxes: Tensor, finest_stride: float) -> Tensor:
    """Cells whose center lies in the target, `widened`: (N, 2), (B, K, 4) -> bool (B, K, N)."""
    low, high = (corner[..., None] for corner in widened(boxes, finest_stride))
    x, y = centers.unbind(-1)
    inside = (x >= low[:, :, 0]) & (x <= high[:, :, 0])
    return inside.logical_and_(y >= low[:, :, 1]).logical_and_(y <= high[:, :, 1])


def score_cost(objectness: Tensor, class_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of sqrt(objectness x class score) with the target's class, summed over classes: logits (B, N, 1)
    and (B, N, C), labels int64 (B, K) -> (B, K, N).

    The sum over the other classes is the same for every target up to one term, so nothing of shape (B, K, N, C) is
    made.
    """
    log_yes = ((logsigmoid(objectness) + logsigmoid(class_logits)) / 2).clamp_(min=_LEAST_LOG)
    log_no = torch.log1p(-log_yes.exp()).clamp_(min=_LEAST_LOG)
    index = labels[..., None].expand(-1, -1, class_logits.shape[1])
    target_term = (log_no - log_yes).transpose(1, 2).gather(1, index)
    return target_term.sub_(log_no.sum(-1)[:, None]).clamp_(min=0)


def near_middle(cells: Cells, boxes: Tensor) -> Tensor:
    """Cells within `CENTER_RADIUS` strides of a target's middle: boxes (B, K, 4) -> bool (B, K, N)."""
    reach = CENTER_RADIUS * cells.strides[:, 0]
    x, y = ((boxes[..., :2] + boxes[..., 2:]) / 2).split(1, -1)
    is_near_x = (x - cells.centers[:, 0]).abs() < reach
    is_near_y = (y - cells.centers[:, 1]).abs() < reach
    return is_near_x.logical_and_(is_near_y)


class Cheapest(NamedTuple):
    """The cheapest cells of each target, T = min(10, N) of them."""

    cells: Tensor  # int64 (B, K, T)
    selected: Tensor  # bool (B, K, T): as many as the target's largest IoUs add up to, if they are candidates
    cost: Tensor  # float32 (B, K, T), inf where the cell is no candidate
    overlap: Tensor  # float32 (B, K, T): IoU


def cheapest_cells(predictions: Predictions, objects: Objects, cells: Cells) -> Cheapest:
    """Chooses the cells of lowest cost for every target, which other targets may choose, too."""
    inside = candidate_cells(cells.centers, objects.boxes, cells.finest_stride)
    near = near_middle(cells, objects.boxes)
    candidates = (inside | near).logical_and_(objects.mask[..., None])
    overlap = iou(predictions.boxes[:, None], objects.boxes[:, :, None]).mul_(candidates)
    cost = score_cost(predictions.objectness, predictions.class_logits, objects.labels)
    cost -= OVERLAP_WEIGHT * (overlap + 1e-8).log()
    cost = torch.where(inside & near, cost, cost + _OUTSIDE).masked_fill_(~candidates, float("inf"))
    most = min(MOST_CELLS, cells.centers.shape[0])
    count = overlap.topk(most, dim=-1).values.sum(-1, keepdim=True).floor().clamp(min=1)
    lowest, chosen = cost.topk(most, dim=-1, largest=False)
    selected = (torch.arange(most, device=chosen.device) < count) & lowest.isfinite()
    return Cheapest(chosen, selected, lowest, overlap.gather(-1, chosen))


class SimOtaAssigner:
    """Assigns to each target the cells of lowest cost, which a low score and a low IoU both raise.

    Candidates are the cells in the target and those near its middle; cells that are both come first. A target gets as
    many cells as the sum of its largest IoUs, at least one. A cell that several targets select goes to the one for
    which it costs least. With ``one_to_one`` a target gets the cheapest cell that no other has.
    """

    def __init__(self, *, one_to_one: bool = False) -> None:
        self.one_to_one = one_to_one

    @torch.no_grad()
    def __call__(self, predictions: Predictions, objects: Objects, cells: Cells) -> SimOtaAssignment:
        """Assigns every image's cells; T = min(10, N), or 1."""
        num_cells = predictions.boxes.shape[1]
        cheapest = self._in_groups(predictions, objects, cells)
        cheapness = 1 / (1 + cheapest.cost)
        if self.one_to_one:  # among all candidates, however small the sum of IoUs
            chosen, assigned = match_one_to_one(cheapest.cells, cheapness, cheapness, num_cells)
            return SimOtaAssignment(cheapest.cells.gather(-1, chosen), assigned, cheapest.overlap.gather(-1, chosen))
        assigned = resolve_conflicts(cheapest.cells, cheapest.selected, cheapness, num_cells)
        return SimOtaAssignment(cheapest.cells, assigned, cheapest.overlap)

    def _in_groups(self, predictions: Predictions, objects: Objects, cells: Cells) -> Cheapest:
        """`cheapest_cells` of a few images at a time, so that intermediates stay small."""
        batch, slots = objects.labels.shape
        num_cells = predictions.boxes.shape[1]
        limit = _GROUP_ELEMENTS_CPU if predictions.boxes.device.type == "cpu" else _GROUP_ELEMENTS
        group = max(1, limit // (slots * max(1, num_cells)))
        parts = []
        for start in range(0, max(batch, 1), group):
            images = slice(start, start + group)
            part = cheapest_cells(
                Predictions(*(tensor[images] for tensor in predictions)),
                Objects(*(tensor[images] for tensor in objects)),
                cells,
            )
            parts.append(part)
        return Cheapest(*(torch.cat(column) for column in zip(*parts)))
