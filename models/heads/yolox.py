"""YOLOX's decoupled head: one tower for class scores, another for box and objectness (Ge et al. 2021).

Legend: B images, L levels, C classes, N cells over all levels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.box_coding import cell_centers, flatten_levels, grid_shapes, offsets_to_cxcywh
from models.heads.base import REFERENCE_SIZE, DetectionHead, output_bias
from models.layers.conv import Conv
from models.layers.csp import SeparableConv
from models.layers.ops import split_parts
from utils.boxes import cxcywh_to_xyxy

if TYPE_CHECKING:
    from models.losses.base import LossSettings
    from models.losses.yolox import YOLOXLoss


class YOLOXHead(DetectionHead):
    """One box per cell, with objectness.

    Raw maps are (B, 5 + C, h, w): x, y, w, h, objectness, classes. Attribute names are those of public state dicts.
    """

    branch = ("stems", "cls_convs", "reg_convs", "cls_preds", "reg_preds", "obj_preds")
    validation_iou = 0.65  # YOLOX
    unused_hyperparameters = frozenset({"anchor_t", "tal_topk"})
    square_letterbox = True  # public weights lose 0.01 AP in rectangles
    refines = True

    def __init__(
        self,
        in_channels: tuple[int, ...],
        strides: tuple[int, ...],
        num_classes: int,
        width: int,
        separable: bool = False,
    ) -> None:
        """``width``: channels of both towers at every level; ``separable``: whether their 3x3 convolutions are
        depthwise-separable."""
        super().__init__(strides, num_classes)
        conv = SeparableConv if separable else Conv

        def tower() -> nn.Sequential:
            return nn.Sequential(conv(width, width, 3), conv(width, width, 3))

        self.stems = nn.ModuleList(Conv(c, width) for c in in_channels)
        self.cls_convs = nn.ModuleList(tower() for _ in in_channels)
        self.reg_convs = nn.ModuleList(tower() for _ in in_channels)
        self.cls_preds = nn.ModuleList(nn.Conv2d(width, num_classes, 1) for _ in in_channels)
        self.reg_preds = nn.ModuleList(nn.Conv2d(width, 4, 1) for _ in in_channels)
        self.obj_preds = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in in_channels)

    def forward_branch(self, features: list[Tensor], *layers: nn.ModuleList) -> list[Tensor]:
        raw = []
        for level, stem, class_tower, box_tower, classes, box, objectness in zip(features, *layers, strict=True):
            stem_features = stem(level)
            box_features = box_tower(stem_features)
            outputs = (box(box_features), objectness(box_features), classes(class_tower(stem_features)))
            raw.append(torch.cat(outputs, 1))
        return raw

    def decode_branch(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes boxes and scores, which are objectness times class score."""
        box, objectness, classes = split_parts(flatten_levels(raw), (4, 1, self.num_classes), -1)
        centers, strides = cell_centers(grid_shapes(raw), self.strides, box.device)
        boxes = cxcywh_to_xyxy(offsets_to_cxcywh(box, centers, strides))
        return boxes, objectness.sigmoid() * classes.sigmoid()

    @torch.no_grad()
    def reset_branch(self, *layers: nn.ModuleList) -> None:
        """Starts boxes in the middle of their cell and two strides wide, objectness at 8 objects per typical image,
        class scores at 0.6 / (C - 0.4), about 1 for C = 1."""
        *_, class_outputs, box_outputs, objectness_outputs = layers
        for classes, box, objectness, stride in zip(
            class_outputs, box_outputs, objectness_outputs, self.strides, strict=True
        ):
            output_bias(box).copy_(torch.tensor([0.5, 0.5, math.log(2), math.log(2)]))
            output_bias(objectness).fill_(math.log(8 / (REFERENCE_SIZE / stride) ** 2))
            output_bias(classes).fill_(math.log(0.6 / (self.num_classes - 0.99999)))

    def branch_loss(self, settings: LossSettings) -> YOLOXLoss:
        from models.losses.yolox import YOLOXLoss  # inference needs no losses

        return YOLOXLoss(settings)

    def branch_class_rows(self) -> dict[str, tuple[int, int]]:
        return {f"cls_preds.{i}": (1, 0) for i in range(len(self.cls_preds))}
