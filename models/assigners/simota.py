"""SimOTA (YOLOX, Ge et al. 2021): the cheapest cells near each target, as many as its overlaps call for.

Fixed shapes, no host sync, no gradient.

Legend: B images, K target slots, N cells over all levels, C classes, T candidates a target.
Frames: boxes are xyxy canvas pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from models.assigners.candidates import candidate_cells, images_a_group, one_each, settle_conflicts
from utils.boxes import iou

MOST_CELLS = 10  # a target; its cells number the sum of this many of its largest overlaps (OTA, Ge et al. 2021)
CENTRE_RADIUS = 2.5  # strides around a target's middle in which its cells lie
OVERLAP_WEIGHT = 3.0  # of the cost of a poor overlap beside that of a poor score
_OUTSIDE = 1e5  # added to the cost of cells that are only in the target or only near its middle: the last resort
_LEAST_LOG = -100.0  # logarithms of probabilities are cut off here


class CellClaims(NamedTuple):
    """The cells of every target. A cell belongs to at most one slot that is held."""

    cells: Tensor  # int64 (B, K, T), any valid index where it is not held
    held: Tensor  # bool (B, K, T)
    overlap: Tensor  # float32 (B, K, T): IoU of the cell's box with the target


def near_middle(centres: Tensor, strides: Tensor, boxes: Tensor) -> Tensor:
    """Cells whose centre is within the radius of the target's middle, by x and by y: bool (B, K, N).

    Args:
        centres: (N, 2) pixels; strides: (N, 1); boxes: (B, K, 4).
    """
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    reach = CENTRE_RADIUS * strides[:, 0]
    across = (middle[..., :1] - centres[:, 0]).abs() < reach
    return across.logical_and_((middle[..., 1:] - centres[:, 1]).abs() < reach)


def score_cost(objectness: Tensor, class_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of sqrt(objectness x class score) with the target's class, summed over classes: (B, K, N).

    The background's share of the sum is the same for every target, so nothing of shape (B, K, N, C) is made.

    Args:
        objectness: (B, N, 1) logits; class_logits: (B, N, C); labels: int64 (B, K).
    """
    log_yes = ((logsigmoid(objectness) + logsigmoid(class_logits)) / 2).clamp_(min=_LEAST_LOG)
    log_no = torch.log1p(-log_yes.exp()).clamp_(min=_LEAST_LOG)
    index = labels[..., None].expand(-1, -1, class_logits.shape[1])
    own = (log_no - log_yes).transpose(1, 2).gather(1, index)
    return own.sub_(log_no.sum(-1)[:, None]).clamp_(min=0)


class SimOtaAssigner:
    """Gives each target the cells of lowest cost: a poor score and a poor overlap both cost.

    Candidates are the cells in the target and those near its middle; cells that are both come first. A target gets as
    many cells as the sum of its largest overlaps, at least one. A cell that several targets claim goes to the one for
    which it costs least. With ``one_to_one`` a target gets the cheapest cell that no other takes.
    """

    def __init__(self, *, one_to_one: bool = False) -> None:
        self.one_to_one = one_to_one

    @torch.no_grad()
    def __call__(
        self,
        objectness: Tensor,
        class_logits: Tensor,
        predicted: Tensor,
        centres: Tensor,
        strides: Tensor,
        labels: Tensor,
        boxes: Tensor,
        mask: Tensor,
        finest_stride: float,
    ) -> CellClaims:
        """Assigns every image's cells; T = min(10, N), or 1.

        Args:
            objectness: (B, N, 1) logits.
            class_logits: (B, N, C).
            predicted: (B, N, 4) decoded boxes.
            centres: (N, 2) pixels.
            strides: (N, 1) pixels.
            labels: int64 (B, K), any valid class where there is no target.
            boxes: (B, K, 4).
            mask: bool (B, K), where there is a target.
            finest_stride: smallest stride, pixels.
        """
        batch, slots = labels.shape
        group = images_a_group(slots, predicted.shape[1], predicted.device)
        images = (objectness, class_logits, predicted, labels, boxes, mask)
        parts = [
            self._cheapest(*(t[i : i + group] for t in images), centres, strides, finest_stride)
            for i in range(0, max(batch, 1), group)
        ]
        cells, wanted, cost, overlap = (torch.cat(column) for column in zip(*parts))
        cheapness = 1 / (1 + cost)
        if self.one_to_one:  # of any of its candidates, however few its overlaps call for
            chosen, held = one_each(cells, cheapness, cheapness, predicted.shape[1])
            return CellClaims(cells.gather(-1, chosen), held, overlap.gather(-1, chosen))
        return CellClaims(cells, settle_conflicts(cells, wanted, cheapness, predicted.shape[1]), overlap)

    def _cheapest(
        self,
        objectness: Tensor,
        class_logits: Tensor,
        predicted: Tensor,
        labels: Tensor,
        boxes: Tensor,
        mask: Tensor,
        centres: Tensor,
        strides: Tensor,
        finest_stride: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The cheapest cells of every target of a group: index, whether it is wanted, cost, IoU; (B, K, T) each."""
        inside = candidate_cells(centres, boxes, finest_stride)
        near = near_middle(centres, strides, boxes)
        candidates = (inside | near).logical_and_(mask[..., None])
        overlap = iou(predicted[:, None], boxes[:, :, None]).mul_(candidates)
        cost = score_cost(objectness, class_logits, labels)
        cost -= OVERLAP_WEIGHT * (overlap + 1e-8).log()
        cost = torch.where(inside & near, cost, cost + _OUTSIDE).masked_fill_(~candidates, float("inf"))
        most = min(MOST_CELLS, centres.shape[0])
        count = overlap.topk(most, dim=-1).values.sum(-1, keepdim=True).floor().clamp(min=1)
        lowest, cells = cost.topk(most, dim=-1, largest=False)
        wanted = (torch.arange(most, device=cells.device) < count) & lowest.isfinite()
        return cells, wanted, lowest, overlap.gather(-1, cells)
