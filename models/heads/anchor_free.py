"""Anchor-free head (YOLOv8 and later): boxes as distances from cell centers to their sides.

Legend: B images, L levels, C classes, R bins of a box side, N cells over all levels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.box_coding import (
    cell_centers,
    convolved_distances,
    distances_to_xyxy,
    flatten_cells,
    flatten_levels,
    grid_shapes,
)
from models.heads.base import REFERENCE_SIZE, DetectionHead, output_bias
from models.layers.conv import Conv, DWConv
from models.layers.ops import split_parts

if TYPE_CHECKING:
    from models.losses.anchor_free import AnchorFreeLoss
    from models.losses.base import LossSettings


class DFL(nn.Module):
    """Computes the means of the distributions of box sides (Generalized Focal Loss, Li et al. 2020). The distances
    0..R-1 are the frozen weight of a convolution, as in public state dicts."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins
        self.conv = nn.Conv2d(bins, 1, 1, bias=False).requires_grad_(False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.conv.weight.copy_(torch.arange(self.bins, dtype=torch.float32).view(1, -1, 1, 1))

    def forward(self, logits: Tensor) -> Tensor:
        """(B, N, 4 * R) -> (B, N, 4), cells. As `expected_distances`, and `convolved_distances` in ONNX graphs."""
        return (logits.unflatten(2, (4, self.bins)).softmax(-1) * self.conv.weight.view(-1)).sum(-1)


class AnchorFreeHead(DetectionHead):
    """Separate box and class layers at each level.

    Box sides are distributions over R bins, each one stride wide; with R = 1 they are distances in strides. Raw maps
    are (B, 4R + C, h, w): the bins of left, top, right and bottom, then classes.
    """

    branch = ("cv2", "cv3")
    validation_iou = 0.7  # YOLOv8
    unused_hyperparameters = frozenset({"obj", "anchor_t"})
    distills = True

    def __init__(
        self,
        in_channels: tuple[int, ...],
        strides: tuple[int, ...],
        num_classes: int,
        reg_max: int = 16,
        depthwise: bool = False,
        classes_of_width: int = 0,
    ) -> None:
        """``depthwise``: whether class layers are depthwise-separable convolutions (YOLO11). ``classes_of_width``:
        number of classes from which their width follows; 0: ``num_classes``."""
        super().__init__(strides, num_classes)
        self.reg_max = reg_max
        box_width = max(16, in_channels[0] // 4, 4 * reg_max)
        class_width = max(in_channels[0], min(classes_of_width or num_classes, 100))
        self.cv2 = nn.ModuleList(
            nn.Sequential(Conv(c, box_width, 3), Conv(box_width, box_width, 3), nn.Conv2d(box_width, 4 * reg_max, 1))
            for c in in_channels
        )
        self.cv3 = nn.ModuleList(self._class_branch(c, class_width, depthwise) for c in in_channels)
        if reg_max > 1:
            self.dfl = DFL(reg_max)

    def _class_branch(self, channels: int, width: int, depthwise: bool) -> nn.Sequential:
        output = nn.Conv2d(width, self.num_classes, 1)
        if not depthwise:
            return nn.Sequential(Conv(channels, width, 3), Conv(width, width, 3), output)
        first = nn.Sequential(DWConv(channels, channels, 3), Conv(channels, width))
        second = nn.Sequential(DWConv(width, width, 3), Conv(width, width))
        return nn.Sequential(first, second, output)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.reg_max > 1:
            self.dfl.reset_parameters()

    @torch.no_grad()
    def reset_branch(self, *layers: nn.ModuleList) -> None:
        """Starts box sides at the middle of their bins (without bins, at two strides) and class scores at 5 objects per
        typical image."""
        boxes, classes = layers
        for box, cls, stride in zip(boxes, classes, self.strides):
            output_bias(box).fill_(1.0 if self.reg_max > 1 else 2.0)
            cells = (REFERENCE_SIZE / stride) ** 2
            output_bias(cls).fill_(math.log(5 / self.num_classes / cells))

    def branch_loss(self, settings: LossSettings) -> AnchorFreeLoss:
        from models.losses.anchor_free import AnchorFreeLoss  # inference needs no losses

        return AnchorFreeLoss(settings, self.reg_max)

    def branch_class_rows(self) -> dict[str, tuple[int, int]]:
        return {f"cv3.{i}.2": (1, 0) for i in range(len(self.cv3))}

    def forward_branch(self, features: list[Tensor], *layers: nn.ModuleList) -> list[Tensor]:
        boxes, classes = layers
        return [torch.cat((box(x), cls(x)), 1) for x, box, cls in zip(features, boxes, classes)]

    def decode_branch(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        sizes = (4 * self.reg_max, self.num_classes)
        # ONNX runtimes are faster with channels before cells, torch with cells before channels.
        if torch.onnx.is_in_onnx_export():
            sides, logits = split_parts(flatten_cells(raw), sizes, 1)
            distances = convolved_distances(sides, self.reg_max).transpose(1, 2)
            scores = logits.sigmoid().transpose(1, 2)
        else:
            sides, logits = flatten_levels(raw).split(sizes, 2)
            distances = self.dfl(sides) if self.reg_max > 1 else sides
            scores = logits.sigmoid()
        centers, strides = cell_centers(grid_shapes(raw), self.strides, sides.device)
        return distances_to_xyxy(distances, centers, strides), scores
