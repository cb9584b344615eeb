"""The loss of YOLOX's head.

Legend: B images, N cells over all levels, C classes, P slots for cells of targets, most of them unused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from models.assigners.simota import Cells, Objects, Predictions, SimOtaAssigner
from models.box_coding import cell_centers, cxcywh_to_offsets, flatten_levels, grid_shapes, offsets_to_cxcywh
from models.layers.ops import gather_cells
from models.losses.base import NO_OBJECT, Criterion, LossSettings, canvas_targets, smooth_labels
from utils.boxes import cxcywh_to_xyxy, iou, xyxy_to_cxcywh
from utils.structures import LossOutput, Targets

# YOLOX weights a positive's box : objectness : one class : L1 as 5 : 1 : 1 : 1. With these constants the defaults box
# 7.5, obj 1, cls 0.5 and dfl 1.5, which are tuned for other heads, give that ratio.
_BOX_GAIN = 2 / 3
_CLASS_GAIN = 2.0
_L1_GAIN = 2 / 3


class YOLOXLoss(Criterion):
    """1 - IoU^2 and class BCE on positive cells, objectness BCE on all cells (YOLOX, Ge et al. 2021).

    The class target of a positive cell is its IoU, the objectness target 1. In the last epochs (`set_closing`) the L1
    distance of a positive's four outputs is added. The normalizer is the number of positive cells.
    """

    names = ("box", "obj", "cls", "l1")

    def __init__(self, settings: LossSettings) -> None:
        super().__init__()
        self.settings, self.strides, hyp = settings, settings.strides, settings.hyp
        self.gains = (hyp.box * _BOX_GAIN, hyp.obj, hyp.cls * _CLASS_GAIN, hyp.dfl * _L1_GAIN)
        self.register_buffer("class_weights", settings.class_weights, persistent=False)
        self.assigner = SimOtaAssigner(one_to_one=settings.one_to_one)
        self.closing = False

    def set_closing(self, closing: bool) -> None:
        self.closing = closing

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: raw maps (B, 5 + C, h, w), one per level."""
        centers, strides = cell_centers(grid_shapes(raw), self.strides, raw[0].device)
        outputs = flatten_levels(raw)
        with torch.no_grad():
            box, objectness, classes = outputs.split((4, 1, self.settings.num_classes), -1)
            predicted = cxcywh_to_xyxy(offsets_to_cxcywh(box, centers, strides))
            labels, boxes, mask = canvas_targets(raw[0], self.strides[0], targets.rows, targets.max_targets)
            cells, assigned, overlap = self.assigner(
                Predictions(objectness, classes, predicted),
                Objects(labels, boxes, mask),
                Cells(centers * strides, strides, min(self.strides)),
            )
            class_targets = smooth_labels(overlap, labels[..., None].expand_as(cells), self.settings)
            class_targets, boxes = class_targets.flatten(1, 2), boxes.repeat_interleave(cells.shape[-1], dim=1)
            cells, weight = cells.flatten(1), assigned.flatten(1).float()  # (B, P)
            is_positive = torch.zeros_like(outputs[..., 4]).scatter_reduce_(1, cells, weight, "amax")

        positives = gather_cells(outputs, cells)  # (B, P, 5 + C)
        predicted = cxcywh_to_xyxy(offsets_to_cxcywh(positives[..., :4], centers[cells], strides[cells]))
        box = (weight * (1 - iou(predicted, boxes).square())).sum()
        objectness = outputs[..., 4]
        if (ignored := self.ignored_cells(raw, targets)) is not None:
            has_no_loss = ignored.of_best_class(outputs[..., 5:]) & (is_positive == 0)
            objectness = torch.where(has_no_loss, NO_OBJECT, objectness)
        obj = binary_cross_entropy_with_logits(objectness, is_positive, reduction="sum")
        cls = binary_cross_entropy_with_logits(positives[..., 5:], class_targets, self.class_weights, reduction="none")
        cls = cls.sum(-1)
        l1 = torch.zeros_like(box)
        if self.closing:
            target_offsets = cxcywh_to_offsets(xyxy_to_cxcywh(boxes), centers[cells], strides[cells])
            l1 = (weight * (positives[..., :4] - target_offsets).abs().sum(-1)).sum()
        return self.weighted((box, obj, (weight * cls).sum(), l1), weight.sum())
