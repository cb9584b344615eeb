"""Loss of anchor-free heads, as sums over a shard of the batch and one normalizer (`LossOutput`).

Legend: B images, M targets, K target slots, N cells over all levels, C classes, R distance bins, T candidates per
target, P = K * T assigned cells of an image, unused ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.assigners.task_aligned import CandidatePairs, TaskAlignedAssigner, list_pairs
from models.box_coding import cell_centers, distances_to_xyxy, expected_distances, grid_shapes
from models.layers.ops import gather_cells, sparse_cross_entropy, split_rows
from models.losses.base import (
    AssignedCells,
    BranchLoss,
    LossOutput,
    LossSettings,
    add_up,
    canvas_targets,
    smooth_labels,
    with_empty_regions,
)
from models.losses.distillation import distill_maps
from models.losses.ignored_cells import IgnoredCells
from utils.batches import Targets
from utils.boxes import iou


def distribution_focal_loss(logits: Tensor, distance: Tensor) -> Tensor:
    """Computes the cross-entropy against the two bins around the true distance (Li et al. 2020).

    Args: logits (*S, R) over distances 0..R-1, and distances (*S) in cells. Returns (*S).
    """
    # The weights of the two bins are a triangle of width 2 about the distance, evaluated on all bins.
    bins = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    distance = distance.clamp(0, logits.shape[-1] - 1)
    weight = (1 - (bins - distance[..., None]).abs()).clamp(min=0)
    return -(logits.log_softmax(-1) * weight).sum(-1)


class _CompiledTerms:
    """`AnchorFreeLoss._terms`, compiled once for the batches of a training, whatever their sizes."""

    def __init__(self, terms: Callable[..., LossOutput], *, has_regions: bool) -> None:
        """``has_regions``: whether batches may have ignore regions, see `prepare`."""
        self._terms = torch.compile(terms, dynamic=True)
        self._has_regions = has_regions

    def accepts(self, targets: Targets) -> bool:
        """Returns True for batches that the compiled terms accept: in training, with two or more targets. torch would
        compile again for a tensor with one row, and for an empty one."""
        return torch.is_grad_enabled() and len(targets.rows) >= 2

    def prepare(self, targets: Targets, images: int) -> Targets:
        """Adds empty ignore regions to a batch of ``images`` that has none, if others have some: otherwise torch would
        compile twice, with and without regions."""
        if not self._has_regions:
            return targets
        return replace(targets, ignore=with_empty_regions(targets.ignore, images, min_images=2))

    def __call__(
        self,
        raw: Sequence[Tensor],
        targets: Tensor,
        max_targets: int,
        pairs: CandidatePairs,
        ignored: IgnoredCells | None,
        teacher_maps: Sequence[Tensor] | None,
    ) -> LossOutput:
        """Arguments: see `AnchorFreeLoss._terms`."""
        # torch gives sizes that are equal in the first batch one symbol, and would compile again when they differ.
        for level in raw:
            torch._dynamo.maybe_mark_dynamic(level, [2, 3])
        for tensor in (targets, *(ignored or ())):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._terms(raw, targets, max_targets, pairs, ignored, teacher_maps)


class AnchorFreeLoss(BranchLoss):
    """BCE on all cells, CIoU and a distance loss on assigned ones (TOOD, Feng et al. 2021; GFL, Li et al. 2020).

    The distance loss is the distribution focal loss or, without bins (R = 1), the mean absolute error in cells. The
    normalizer is the sum of target scores.
    """

    distilled_classes: Tensor  # int64, classes with targets from a teacher

    def __init__(self, settings: LossSettings, reg_max: int) -> None:
        super().__init__(settings)
        hyp = settings.hyp
        self.strides = settings.strides
        self.reg_max = reg_max
        self.names = ("box", "cls", "dfl" if reg_max > 1 else "l1")
        self.gains = (hyp.box, hyp.cls, hyp.dfl)
        if settings.distilled_classes:
            self.register_buffer("distilled_classes", torch.tensor(settings.distilled_classes), persistent=False)
            self.names = (*self.names, "distill")
            self.gains = (*self.gains, hyp.distill)
        self.assigner = TaskAlignedAssigner(topk=hyp.tal_topk, one_to_one=settings.one_to_one)
        self._compiled_terms: _CompiledTerms | None = None

    def compile_terms(self, *, has_regions: bool = False) -> None:
        """Compiles the terms, see `Criterion.compile_terms`."""
        self._compiled_terms = _CompiledTerms(self._terms, has_regions=has_regions)

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: raw maps (B, 4R + C, h, w), one per level."""
        images = raw[0].shape[0]
        compute_terms: Callable[..., LossOutput] = self._terms
        if self._compiled_terms is not None and self._compiled_terms.accepts(targets):
            compute_terms = self._compiled_terms
            targets = self._compiled_terms.prepare(targets, images)
        pairs = list_pairs(targets.on_host, images, targets.max_targets, grid_shapes(raw), self.strides, raw[0].device)
        ignored = self.ignored_cells(raw, targets)
        return compute_terms(raw, targets.rows, targets.max_targets, pairs, ignored, teacher_maps)

    def _terms(
        self,
        raw: Sequence[Tensor],
        targets: Tensor,
        max_targets: int,
        pairs: CandidatePairs,
        ignored: IgnoredCells | None,
        teacher_maps: Sequence[Tensor] | None,
    ) -> LossOutput:
        """Assigns the targets and computes the loss: the part of `forward` that runs on the device.

        ``targets``: (M, 6) as in `Targets`.
        """
        centers, strides = cell_centers(grid_shapes(raw), self.strides, raw[0].device)
        box_logits, class_logits = split_rows(raw, 4 * self.reg_max)
        with torch.no_grad():
            distances = expected_distances(box_logits.unflatten(-1, (4, self.reg_max)))
            predicted = distances_to_xyxy(distances, centers, strides)
            labels, boxes, _ = canvas_targets(raw[0], self.strides[0], targets, max_targets)
            assigned = self._assign(class_logits, predicted, labels, boxes, pairs)

        logits = gather_cells(box_logits, assigned.cells)
        box, distance = self._box_terms(logits, assigned, centers[assigned.cells], strides[assigned.cells])
        if ignored is not None:
            score = torch.zeros_like(class_logits[..., 0])
            score.scatter_reduce_(1, assigned.cells, assigned.weight, "amax")
            ignored = ignored.except_positive(score > 0)
        cls = sparse_cross_entropy(class_logits, assigned.cells, assigned.class_targets, self.class_weights, ignored)
        normalizer = assigned.weight.sum()
        terms = [box, cls, distance]
        if self.settings.distilled_classes:
            assert teacher_maps is not None, "a loss with a teacher needs its maps"
            distill, weight = self._distillation((box_logits, class_logits), teacher_maps, ignored, centers, strides)
            terms.append(distill)
            normalizer = normalizer + weight
        return self.weighted(terms, normalizer)

    def _distillation(
        self,
        logits: tuple[Tensor, Tensor],
        teacher_maps: Sequence[Tensor],
        ignored: IgnoredCells | None,
        centers: Tensor,
        strides: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Computes the sum of the terms of the teacher's targets (), and the sum of their weights ().

        ``logits``: box logits (B, N, 4R) and class logits (B, N, C).
        """
        distilled = distill_maps(
            logits,
            teacher_maps,
            self.distilled_classes,
            ignored,
            centers,
            strides,
            unlabeled_only=self.settings.unlabeled_only,
        )
        terms = (distilled.box, distilled.cls, distilled.sides)
        return add_up([gain * term for gain, term in zip(self.gains, terms)]), distilled.weight

    def _assign(
        self, class_logits: Tensor, predicted: Tensor, labels: Tensor, boxes: Tensor, pairs: CandidatePairs
    ) -> AssignedCells:
        """Assigns cells to targets and makes the targets of each. Arguments: see `TaskAlignedAssigner`."""
        cells, scores = self.assigner(class_logits, predicted, labels, boxes, pairs)  # (B, K, T)
        class_targets = smooth_labels(scores, labels[..., None].expand_as(cells), self.settings)
        return AssignedCells(
            cells=cells.flatten(1),
            weight=scores.flatten(1),
            boxes=boxes.repeat_interleave(scores.shape[-1], dim=1),
            class_targets=class_targets.flatten(1, 2),
        )

    def _box_terms(
        self, logits: Tensor, assigned: AssignedCells, centers: Tensor, strides: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the weighted sums over assigned cells of 1 - CIoU and of the distance loss.

        Args: logits (B, P, 4R); centers (B, P, 2) in cells; strides (B, P, 1) in pixels.
        """
        logits = logits.unflatten(-1, (4, self.reg_max))
        distances = expected_distances(logits)
        predicted = distances_to_xyxy(distances, centers, strides)
        box = (assigned.weight * (1 - iou(predicted, assigned.boxes, kind="ciou"))).sum()
        low, high = (assigned.boxes / strides).split(2, -1)
        true_distances = torch.cat((centers - low, high - centers), -1)
        if self.reg_max > 1:
            error = distribution_focal_loss(logits, true_distances)
        else:
            error = (distances - true_distances).abs()
        return box, (assigned.weight * error.mean(-1)).sum()
