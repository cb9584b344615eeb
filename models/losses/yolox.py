"""Loss of YOLOX's head.

Legend: B images, N cells over all levels, K target slots, C classes, T candidates per target, P = K * T assigned cells
of an image, most of them unused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from models.assigners.simota import Cells, Predictions, SimOtaAssigner, TargetSlots
from models.box_coding import cell_centers, cxcywh_to_offsets, flatten_levels, grid_shapes, offsets_to_cxcywh
from models.layers.ops import gather_cells
from models.losses.base import (
    NO_OBJECT,
    AssignedCells,
    BranchLoss,
    LossOutput,
    LossSettings,
    canvas_targets,
    smooth_labels,
)
from utils.batches import Targets
from utils.boxes import cxcywh_to_xyxy, iou, xyxy_to_cxcywh

# YOLOX weights a positive's box : objectness : one class : L1 as 5 : 1 : 1 : 1. With these constants the defaults box
# 7.5, obj 1, cls 0.5 and dfl 1.5, which are tuned for the other heads, give the same ratio.
_BOX_GAIN = 2 / 3
_CLASS_GAIN = 2.0
_L1_GAIN = 2 / 3


class YOLOXLoss(BranchLoss):
    """1 - IoU^2 and class BCE on positive cells, objectness BCE on all cells (YOLOX, Ge et al. 2021).

    The class target of a positive cell is its IoU, the objectness target 1. In the last epochs (`set_no_mosaic`) the L1
    distance of a positive's four outputs is added. The normalizer is the number of positive cells.
    """

    names = ("box", "obj", "cls", "l1")

    def __init__(self, settings: LossSettings) -> None:
        super().__init__(settings)
        hyp = settings.hyp
        self.strides = settings.strides
        self.gains = (hyp.box * _BOX_GAIN, hyp.obj, hyp.cls * _CLASS_GAIN, hyp.dfl * _L1_GAIN)
        self.assigner = SimOtaAssigner(one_to_one=settings.one_to_one)
        self.no_mosaic = False

    def set_no_mosaic(self, no_mosaic: bool) -> None:
        self.no_mosaic = no_mosaic

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: raw maps (B, 5 + C, h, w), one per level."""
        centers, strides = cell_centers(grid_shapes(raw), self.strides, raw[0].device)
        outputs = flatten_levels(raw)  # (B, N, 5 + C)
        labels, boxes, mask = canvas_targets(raw[0], self.strides[0], targets.rows, targets.max_targets)
        assigned = self._assign(outputs, TargetSlots(labels, boxes, mask), centers, strides)
        weight = assigned.weight
        cell_center = centers[assigned.cells]
        cell_stride = strides[assigned.cells]

        picked = gather_cells(outputs, assigned.cells)  # (B, P, 5 + C)
        predicted = cxcywh_to_xyxy(offsets_to_cxcywh(picked[..., :4], cell_center, cell_stride))
        box = (weight * (1 - iou(predicted, assigned.boxes).square())).sum()
        obj = self._objectness_term(raw, outputs, targets, assigned)
        cls = binary_cross_entropy_with_logits(
            picked[..., 5:], assigned.class_targets, self.class_weights, reduction="none"
        ).sum(-1)
        l1 = torch.zeros_like(box)
        if self.no_mosaic:
            target_offsets = cxcywh_to_offsets(xyxy_to_cxcywh(assigned.boxes), cell_center, cell_stride)
            l1 = (weight * (picked[..., :4] - target_offsets).abs().sum(-1)).sum()
        return self.weighted((box, obj, (weight * cls).sum(), l1), weight.sum())

    @torch.no_grad()
    def _assign(self, outputs: Tensor, objects: TargetSlots, centers: Tensor, strides: Tensor) -> AssignedCells:
        """Assigns cells to targets, by the decoded ``outputs`` (B, N, 5 + C), and makes the targets of each. A positive
        has weight 1."""
        box, objectness, classes = outputs.split((4, 1, self.settings.num_classes), -1)
        predicted = cxcywh_to_xyxy(offsets_to_cxcywh(box, centers, strides))
        cells, is_assigned, overlap = self.assigner(  # (B, K, T)
            Predictions(objectness, classes, predicted), objects, Cells(centers * strides, strides, min(self.strides))
        )
        class_targets = smooth_labels(overlap, objects.labels[..., None].expand_as(cells), self.settings)
        return AssignedCells(
            cells=cells.flatten(1),
            weight=is_assigned.flatten(1).float(),
            boxes=objects.boxes.repeat_interleave(cells.shape[-1], dim=1),
            class_targets=class_targets.flatten(1, 2),
        )

    def _objectness_term(
        self, raw: Sequence[Tensor], outputs: Tensor, targets: Targets, assigned: AssignedCells
    ) -> Tensor:
        """Sums the objectness BCE of all cells, except those in regions where the class they predict is ignored.
        ``outputs``: (B, N, 5 + C)."""
        objectness = outputs[..., 4]
        is_positive = torch.zeros_like(objectness).scatter_reduce_(1, assigned.cells, assigned.weight, "amax")
        ignored = self.ignored_cells(raw, targets)
        if ignored is not None:
            is_ignored = ignored.of_best_class(outputs[..., 5:]) & (is_positive == 0)
            objectness = torch.where(is_ignored, NO_OBJECT, objectness)
        return binary_cross_entropy_with_logits(objectness, is_positive, reduction="sum")
