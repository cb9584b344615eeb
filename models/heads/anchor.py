"""Anchor-based head (YOLOv5): boxes as offsets from anchors.

Legend: B images, L levels, C classes, A anchors per cell, N predictions over all levels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.box_coding import anchor_to_cxcywh, cell_centers, grid_shapes
from models.heads.base import REFERENCE_SIZE, DetectionHead, output_bias
from models.layers.ops import split_parts
from utils.boxes import cxcywh_to_xyxy

if TYPE_CHECKING:
    from models.losses.anchor import AnchorLoss
    from models.losses.base import LossSettings


class AnchorHead(DetectionHead):
    """One 1x1 convolution per level; each anchor predicts x, y, w, h, objectness and classes (YOLOv3 to v5).

    Raw maps are (B, A * (5 + C), h, w), anchor by anchor.
    """

    anchors: Tensor
    branch = ("m",)
    validation_iou = 0.6  # YOLOv5
    unused_hyperparameters = frozenset({"dfl", "tal_topk"})

    def __init__(
        self,
        in_channels: tuple[int, ...],
        strides: tuple[int, ...],
        num_classes: int,
        anchors_px: list[list[float]] | int,
    ) -> None:
        """``anchors_px``: a row w, h, w, h, ... in canvas pixels for each level; or A, for square anchors."""
        super().__init__(strides, num_classes)
        self.anchors_px = square_anchors(anchors_px, strides) if isinstance(anchors_px, int) else anchors_px
        self.num_anchors = len(self.anchors_px[0]) // 2
        self.register_buffer("anchors", torch.zeros(len(strides), self.num_anchors, 2))
        self.m = nn.ModuleList(nn.Conv2d(c, self.num_anchors * (5 + num_classes), 1) for c in in_channels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        pixels = torch.tensor(self.anchors_px, dtype=torch.float32).unflatten(1, (-1, 2))
        self.anchors.copy_(pixels / torch.tensor(self.strides, dtype=torch.float32).view(-1, 1, 1))

    @torch.no_grad()
    def reset_branch(self, *layers: nn.ModuleList) -> None:
        """Starts boxes as their anchors, objectness at 8 objects per typical image, class scores at 0.6 / (C - 0.4),
        about 1 for C = 1."""
        (outputs,) = layers
        for conv, stride in zip(outputs, self.strides):
            bias = output_bias(conv).view(self.num_anchors, 5 + self.num_classes)
            bias[:, :4] = 0.0
            bias[:, 4] = math.log(8 / (REFERENCE_SIZE / stride) ** 2)
            bias[:, 5:] = math.log(0.6 / (self.num_classes - 0.99999))

    def branch_loss(self, settings: LossSettings) -> AnchorLoss:
        from models.losses.anchor import AnchorLoss  # inference needs no losses

        return AnchorLoss(settings, self.anchors)

    def branch_class_rows(self) -> dict[str, tuple[int, int]]:
        return {f"m.{i}": (self.num_anchors, 5) for i in range(len(self.m))}

    def forward_branch(self, features: list[Tensor], *layers: nn.ModuleList) -> list[Tensor]:
        (outputs,) = layers
        return [conv(x) for x, conv in zip(features, outputs)]

    def decode_branch(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes boxes and scores, which are objectness times class score. N runs over levels, then anchors, rows and
        columns."""
        boxes: list[Tensor] = []
        scores: list[Tensor] = []
        for number, (level, stride) in enumerate(zip(raw, self.strides)):
            anchors = self.anchors[number]  # iterating over a tensor cannot be traced
            centers, _ = cell_centers(grid_shapes([level]), (stride,), level.device)
            by_anchor = level.float().unflatten(1, (self.num_anchors, 5 + self.num_classes))  # (B, A, 5 + C, h, w)
            outputs = by_anchor.permute(0, 1, 3, 4, 2).flatten(2, 3)  # (B, A, h * w, 5 + C)
            coordinates, objectness, classes = split_parts(outputs, (4, 1, self.num_classes), -1)
            center, size = anchor_to_cxcywh(coordinates, anchors.float()[:, None]).split(2, -1)
            cxcywh = torch.cat((center + (centers - 0.5), size), -1) * stride
            boxes.append(cxcywh_to_xyxy(cxcywh).flatten(1, 2))
            scores.append((objectness.sigmoid() * classes.sigmoid()).flatten(1, 2))
        return torch.cat(boxes, 1), torch.cat(scores, 1)


def square_anchors(count: int, strides: tuple[int, ...]) -> list[list[float]]:
    """Creates ``count`` square anchors per level, with sides between 2 and 8 strides, spaced by equal ratios: rows w,
    h, w, h, ... in pixels."""
    rows = []
    for stride in strides:
        sides = [stride * 2 ** (1 + (k + 0.5) * 2 / count) for k in range(count)]
        rows.append([side for side in sides for _ in ("w", "h")])
    return rows
