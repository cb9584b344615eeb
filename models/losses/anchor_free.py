"""Which loss a model has, and the anchor-free one: sums over a share of the batch and one normaliser (`LossOutput`).

No loss waits for the device or has a shape that depends on values. Every image's contribution is independent of the
others', so totals and normalisers of shares add up to the whole batch's.

Label smoothing (Szegedy et al. 2016) moves the share eps of a positive cell's class score evenly onto all C classes.
It keeps the sum over classes, so it alters neither the normaliser nor the background, and does nothing for one class.

Reproducibility: the forward pass scatters only by maximum, which no order changes. Backwards, picking rows of logits
becomes an indexed addition. In the anchor-free loss one term a place is not 0; in the anchor loss there may be several
(two targets in one cell), whose order CUDA fixes only under torch.use_deterministic_algorithms.

Legend: B images, K target slots, N cells over all levels, C classes, R distance bins, T candidates a target,
P picked cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from models.assigners.task_aligned import PairGroup, TaskAlignedAssigner, group_pairs
from models.box_coding import cell_centres, distances_to_xyxy, expected_distances, split_rows
from models.losses.base import Criterion, canvas_targets, gather_cells, smooth_labels, sparse_cross_entropy
from utils.boxes import iou
from utils.config.settings import Hyperparameters
from utils.structures import LossOutput


def distribution_focal_loss(logits: Tensor, distance: Tensor) -> Tensor:
    """Cross-entropy against the two bins around the true distance (Li et al. 2020).

    The two weights are a triangle of width 2 about the distance, evaluated on all bins, which needs no indexing.

    Args:
        logits: (*S, R) over distances 0..R-1, cells.
        distance: (*S), clamped to that range.

    Returns:
        (*S).
    """
    bins = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    distance = distance.clamp(0, logits.shape[-1] - 1)
    weight = (1 - (bins - distance[..., None]).abs()).clamp(min=0)
    return -(logits.log_softmax(-1) * weight).sum(-1)


class AnchorFreeLoss(Criterion):
    """BCE on all cells, CIoU and a loss of distances on assigned ones (TOOD and GFL papers).

    The loss of distances is the distribution focal loss, or without bins (R = 1) their mean absolute error in cells.
    ``names`` label ``LossOutput.parts``. The normaliser is the sum of target scores.
    """

    def __init__(
        self,
        *,
        strides: Sequence[int],
        num_classes: int,
        reg_max: int,
        hyp: Hyperparameters,
        label_smoothing: float,
        one_to_one: bool = False,
    ):
        super().__init__()
        self.names = ("box", "cls", "dfl" if reg_max > 1 else "l1")
        self.strides, self.num_classes, self.reg_max = tuple(strides), num_classes, reg_max
        self.gains = (hyp.box, hyp.cls, hyp.dfl)
        self.label_smoothing = label_smoothing
        self.assigner = TaskAlignedAssigner(
            topk=hyp.tal_topk, alpha=hyp.tal_alpha, beta=hyp.tal_beta, one_to_one=one_to_one
        )
        self._compiled_terms: Callable[..., LossOutput] | None = None

    def compile_terms(self) -> None:
        self._compiled_terms = torch.compile(self._terms, dynamic=True)

    def forward(
        self, raw: Sequence[Tensor], targets: Tensor, max_targets: int, host_targets: np.ndarray | None = None
    ) -> LossOutput:
        """Args: raw maps (B, 4R + C, h, w) a level; the rest as in `Batch`. Without ``host_targets`` the targets are
        read from their device, which the host waits for."""
        shapes = tuple((x.shape[2], x.shape[3]) for x in raw)
        on_host = targets.cpu().numpy() if host_targets is None else host_targets
        canvas_hw = (shapes[0][0] * self.strides[0], shapes[0][1] * self.strides[0])
        groups = group_pairs(on_host, raw[0].shape[0], shapes, self.strides, canvas_hw, raw[0].device)
        is_compiled = self._compiled_terms is not None and torch.is_grad_enabled()
        return (self._compiled_terms if is_compiled else self._terms)(raw, targets, max_targets, groups)

    def _terms(
        self, raw: Sequence[Tensor], targets: Tensor, max_targets: int, groups: Sequence[PairGroup]
    ) -> LossOutput:
        """`forward`, from where the device takes over."""
        shapes = tuple((x.shape[2], x.shape[3]) for x in raw)
        centres, strides = cell_centres(shapes, self.strides, raw[0].device)
        box_logits, class_logits = split_rows(raw, 4 * self.reg_max)
        with torch.no_grad():
            distances = expected_distances(box_logits.unflatten(-1, (4, self.reg_max)))
            predicted = distances_to_xyxy(distances, centres, strides)
            labels, boxes, mask = canvas_targets(raw[0], self.strides[0], targets, max_targets)
            cells, scores = self.assigner(
                class_logits, predicted, labels, boxes, mask, shapes=shapes, strides=self.strides, groups=groups
            )
            slot_labels = labels[..., None].expand_as(cells)
            class_targets = smooth_labels(scores, slot_labels, self.num_classes, self.label_smoothing).flatten(1, 2)

        cells, weight = cells.flatten(1), scores.flatten(1)  # (B, P) with P = K * T
        boxes = boxes.repeat_interleave(scores.shape[-1], dim=1)
        box, sides = self._box_terms(gather_cells(box_logits, cells), boxes, centres[cells], strides[cells], weight)
        cls = sparse_cross_entropy(class_logits, cells, class_targets)
        parts = [gain * term for gain, term in zip(self.gains, (box, cls, sides), strict=True)]
        return LossOutput(sum(parts), scores.sum(), torch.stack(parts).detach())

    def _box_terms(
        self, logits: Tensor, boxes: Tensor, centres: Tensor, strides: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted sums over slots of 1 - CIoU and of the loss of distances.

        Args: logits (B, P, 4R); boxes (B, P, 4) pixels; centres (B, P, 2) in cells; strides (B, P, 1); weight (B, P).
        """
        logits = logits.unflatten(-1, (4, self.reg_max))
        distances = expected_distances(logits)
        predicted = distances_to_xyxy(distances, centres, strides)
        box = (weight * (1 - iou(predicted, boxes, kind="ciou"))).sum()
        low, high = (boxes / strides).split(2, -1)
        true_distances = torch.cat((centres - low, high - centres), -1)
        if self.reg_max > 1:
            error = distribution_focal_loss(logits, true_distances)
        else:
            error = (distances - true_distances).abs()
        return box, (weight * error.mean(-1)).sum()
