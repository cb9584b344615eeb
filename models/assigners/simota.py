"""SimOTA (YOLOX, Ge et al. 2021): the cheapest cells near each target, as many as its largest IoUs add up to. Fixed
shapes, no host sync, no gradient.

Legend: B images, K target slots, N cells over all levels, C classes, T candidates per target. Boxes are xyxy canvas
pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class SimOtaAssigner:
    """Assigns to each target the cells of lowest cost, which a low score and a low IoU both raise.

    Candidates are the cells in the target and those near its middle; cells that are both come first. A target gets as
    many cells as the sum of its largest IoUs, at least one. A cell that several targets select goes to the one for
    which it costs least. With ``one_to_one`` a target gets the cheapest cell that no other has.
    """

    def __init__(self, *, one_to_one: bool = False) -> None:
        self.one_to_one = one_to_one

    @torch.no_grad()
    def __call__(
        self,
        objectness: Tensor,
        class_logits: Tensor,
        predicted: Tensor,
        centers: Tensor,
        strides: Tensor,
        labels: Tensor,
        boxes: Tensor,
        mask: Tensor,
        finest_stride: float,
    ) -> SimOtaAssignment:
        """Assigns every image's cells; T = min(10, N), or 1.

        Args:
            objectness: (B, N, 1) logits.
            class_logits: (B, N, C).
            predicted: (B, N, 4) decoded boxes.
            centers, strides: (N, 2) and (N, 1) pixels.
            labels: int64 (B, K), any valid class where there is no target.
            boxes: (B, K, 4).
            mask: bool (B, K), where there is a target.
        """
        batch, slots = labels.shape
        limit = _GROUP_ELEMENTS_CPU if predicted.device.type == "cpu" else _GROUP_ELEMENTS
        group = max(1, limit // (slots * max(1, predicted.shape[1])))
        images = (objectness, class_logits, predicted, labels, boxes, mask)
        parts = [
            self._cheapest([t[i : i + group] for t in images], centers, strides, finest_stride)
            for i in range(0, max(batch, 1), group)
        ]
        cells, selected, cost, overlap = (torch.cat(column) for column in zip(*parts))
        cheapness = 1 / (1 + cost)
        if self.one_to_one:  # among all candidates, however small the sum of IoUs
            chosen, assigned = match_one_to_one(cells, cheapness, cheapness, predicted.shape[1])
            return SimOtaAssignment(cells.gather(-1, chosen), assigned, overlap.gather(-1, chosen))
        assigned = resolve_conflicts(cells, selected, cheapness, predicted.shape[1])
        return SimOtaAssignment(cells, assigned, overlap)

    def _cheapest(
        self, images: Sequence[Tensor], centers: Tensor, strides: Tensor, finest_stride: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The cheapest cells of every target of a group: index, whether selected, cost, IoU; (B, K, T) each."""
        objectness, class_logits, predicted, labels, boxes, mask = images
        inside = candidate_cells(centers, boxes, finest_stride)
        reach, (x, y) = CENTER_RADIUS * strides[:, 0], ((boxes[..., :2] + boxes[..., 2:]) / 2).split(1, -1)
        near = ((x - centers[:, 0]).abs() < reach).logical_and_((y - centers[:, 1]).abs() < reach)
        candidates = (inside | near).logical_and_(mask[..., None])
        overlap = iou(predicted[:, None], boxes[:, :, None]).mul_(candidates)
        cost = score_cost(objectness, class_logits, labels)
        cost -= OVERLAP_WEIGHT * (overlap + 1e-8).log()
        cost = torch.where(inside & near, cost, cost + _OUTSIDE).masked_fill_(~candidates, float("inf"))
        most = min(MOST_CELLS, centers.shape[0])
        count = overlap.topk(most, dim=-1).values.sum(-1, keepdim=True).floor().clamp(min=1)
        lowest, cells = cost.topk(most, dim=-1, largest=False)
        selected = (torch.arange(most, device=cells.device) < count) & lowest.isfinite()
        return cells, selected, lowest, overlap.gather(-1, cells)
