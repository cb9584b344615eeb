"""The loss of anchor-free heads, as sums over a shard of the batch and one normalizer (`LossOutput`).

Legend: B images, K target slots, N cells over all levels, C classes, R distance bins, T candidates per target,
P picked cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.assigners.task_aligned import CandidatePairs, TaskAlignedAssigner, list_pairs
from models.box_coding import cell_centers, distances_to_xyxy, expected_distances, grid_shapes
from models.layers.ops import gather_cells, sparse_cross_entropy, split_rows
from models.losses.base import Criterion, IgnoredCells, LossSettings, canvas_targets, smooth_labels, with_empty_regions
from utils.boxes import iou
from utils.structures import LossOutput, Targets


def distribution_focal_loss(logits: Tensor, distance: Tensor) -> Tensor:
    """Cross-entropy against the two bins around the true distance (Li et al. 2020): logits (*S, R) over distances
    0..R-1, and distances (*S), cells -> (*S)."""
    # The weights of the two bins are a triangle of width 2 about the distance, evaluated on all bins.
    bins = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    distance = distance.clamp(0, logits.shape[-1] - 1)
    weight = (1 - (bins - distance[..., None]).abs()).clamp(min=0)
    return -(logits.log_softmax(-1) * weight).sum(-1)


class AnchorFreeLoss(Criterion):
    """BCE on all cells, CIoU and a distance loss on assigned ones (TOOD, Feng et al. 2021; GFL, Li et al. 2020).

    The distance loss is the distribution focal loss or, without bins (R = 1), the mean absolute error in cells. The
    normalizer is the sum of target scores.
    """

    def __init__(self, settings: LossSettings, reg_max: int) -> None:
        super().__init__()
        self.settings, self.strides, self.reg_max, hyp = settings, settings.strides, reg_max, settings.hyp
        self.names = ("box", "cls", "dfl" if reg_max > 1 else "l1")
        self.gains = (hyp.box, hyp.cls, hyp.dfl)
        if settings.taught:
            from models.losses.distillation import distill_maps

            self._distill = distill_maps
            self.register_buffer("taught", torch.tensor(settings.taught), persistent=False)
            self.names, self.gains = (*self.names, "distill"), (*self.gains, hyp.distill)
        self.register_buffer("class_weights", settings.class_weights, persistent=False)
        self.assigner = TaskAlignedAssigner(topk=hyp.tal_topk, one_to_one=settings.one_to_one)
        self._compiled_terms: Callable[..., LossOutput] | None = None
        self._has_regions = False  # whether the compiled terms always get regions to ignore; see `compile_terms`

    def compile_terms(self, *, has_regions: bool = False) -> None:
        """See `Criterion.compile_terms`. With and without regions are two versions: where batches may have regions, the
        others get empty ones."""
        self._compiled_terms = torch.compile(self._terms, dynamic=True)
        self._has_regions = has_regions

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: raw maps (B, 4R + C, h, w), one per level."""
        images = raw[0].shape[0]
        is_compiled = self._runs_compiled(targets)
        if is_compiled and self._has_regions:
            targets = replace(targets, ignore=with_empty_regions(targets.ignore, images, 2))
        pairs = list_pairs(targets.on_host, images, targets.max_targets, grid_shapes(raw), self.strides, raw[0].device)
        ignored = self.ignored_cells(raw, targets)
        arguments = (raw, targets.rows, targets.max_targets, pairs, ignored, teacher_maps)
        if not is_compiled:
            return self._terms(*arguments)
        # Sizes that are equal in the first batch would be taken for one, and other batches would need another version.
        for level in raw:
            torch._dynamo.maybe_mark_dynamic(level, [2, 3])
        for tensor in (targets.rows, *(ignored or ())):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._compiled_terms(*arguments)

    def _runs_compiled(self, targets: Targets) -> bool:
        """Whether the compiled terms, which are for training and for two targets or more, take ``targets``: torch
        compiles a version of its own for a tensor with one row, and another for one without."""
        return self._compiled_terms is not None and torch.is_grad_enabled() and len(targets.rows) > 1

    def _terms(
        self,
        raw: Sequence[Tensor],
        targets: Tensor,
        max_targets: int,
        pairs: CandidatePairs,
        ignored: IgnoredCells | None,
        teacher_maps: Sequence[Tensor] | None,
    ) -> LossOutput:
        """The part of `forward` that runs on the device: assigns the targets and computes the loss. ``targets``: the
        rows, (M, 6)."""
        centers, strides = cell_centers(grid_shapes(raw), self.strides, raw[0].device)
        box_logits, class_logits = split_rows(raw, 4 * self.reg_max)
        with torch.no_grad():
            distances = expected_distances(box_logits.unflatten(-1, (4, self.reg_max)))
            predicted = distances_to_xyxy(distances, centers, strides)
            labels, boxes, _ = canvas_targets(raw[0], self.strides[0], targets, max_targets)
            cells, scores = self.assigner(class_logits, predicted, labels, boxes, pairs)
            class_targets = smooth_labels(scores, labels[..., None].expand_as(cells), self.settings).flatten(1, 2)

        cells, weight = cells.flatten(1), scores.flatten(1)  # (B, P) with P = K * T
        boxes = boxes.repeat_interleave(scores.shape[-1], dim=1)
        picked = gather_cells(box_logits, cells)
        box, distance = self._box_terms(picked, boxes, centers[cells], strides[cells], weight)
        if ignored is not None:
            assigned = torch.zeros_like(class_logits[..., 0]).scatter_reduce_(1, cells, weight, "amax")
            ignored = ignored.except_positive(assigned > 0)
        cls = sparse_cross_entropy(class_logits, cells, class_targets, self.class_weights, ignored)
        normalizer = scores.sum()
        if not self.settings.taught:
            return self.weighted((box, cls, distance), normalizer)
        unlabeled, both = self.settings.unlabeled_only, (box_logits, class_logits)
        found = self._distill(both, teacher_maps, self.taught, ignored, centers, strides, unlabeled_only=unlabeled)
        distill = sum(gain * term for gain, term in zip(self.gains, found[:3]))
        return self.weighted((box, cls, distance, distill), normalizer + found.weight)

    def _box_terms(
        self, logits: Tensor, boxes: Tensor, centers: Tensor, strides: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted sums over slots of 1 - CIoU and of the distance loss.

        Args: logits (B, P, 4R); boxes (B, P, 4) pixels; centers (B, P, 2) in cells; strides (B, P, 1); weight (B, P).
        """
        logits = logits.unflatten(-1, (4, self.reg_max))
        distances = expected_distances(logits)
        predicted = distances_to_xyxy(distances, centers, strides)
        box = (weight * (1 - iou(predicted, boxes, kind="ciou"))).sum()
        low, high = (boxes / strides).split(2, -1)
        true_distances = torch.cat((centers - low, high - centers), -1)
        if self.reg_max > 1:
            error = distribution_focal_loss(logits, true_distances)
        else:
            error = (distances - true_distances).abs()
        return box, (weight * error.mean(-1)).sum()
