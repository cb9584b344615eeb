"""A detector that looks at each picture several times, mirrored and larger, and puts all it sees into one frame.

Made from a detector and used in its place: its raw maps are those of all views, and its decoded boxes those of all
views in the pixels of the one canvas, for one non-maximum suppression over everything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from models.detector import Detector
from utils.structures import GREY


class View(NamedTuple):
    """How a canvas is looked at. Sides scale to whole pixels, so by not quite the same factor."""

    scale: float
    mirrored: bool  # left and right

    def content_hw(self, canvas_hw: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the scaled canvas; what is added to reach whole strides is right and below."""
        height, width = (max(round(side * self.scale), 1) for side in canvas_hw)
        return height, width


AS_IT_IS = View(1.0, False)
VIEWS = (AS_IT_IS, View(1.0, True), View(1.25, True))  # by measurement: benchmarks/README.md


class ManyViews(nn.Module):
    """Called and decoded like the `Detector` it holds.

    Args:
        detector: for inference.
        views: the first must be `AS_IT_IS`, by whose maps the canvas is known.
    """

    def __init__(self, detector: Detector, views: tuple[View, ...] = VIEWS) -> None:
        super().__init__()
        if not views or views[0] != AS_IT_IS:
            raise ValueError("the first view must be the canvas as it is")
        self.detector, self.views = detector, views

    @property
    def head(self) -> nn.Module:
        return self.detector.head

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images float (B, 3, H, W) in [0, 1], H and W multiples of the stride, to the raw maps of all views."""
        return [level for view in self.views for level in self.detector(self._seen(images, view))]

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Raw maps to boxes float32 (B, N, 4), xyxy pixels of the canvas as it is, and scores float32 (B, N, C); N
        runs over the views, then over a view's predictions."""
        levels = len(raw) // len(self.views)
        canvas_hw = tuple(side * self.detector.strides[0] for side in raw[0].shape[2:])
        boxes, scores = [], []
        for number, view in enumerate(self.views):
            own_boxes, own_scores = self.detector.decode(raw[number * levels : (number + 1) * levels])
            boxes.append(to_canvas(own_boxes, view, canvas_hw))
            scores.append(own_scores)
        return torch.cat(boxes, 1), torch.cat(scores, 1)

    def _seen(self, images: Tensor, view: View) -> Tensor:
        height, width = content_hw = view.content_hw(images.shape[2:])
        if view.mirrored:
            images = images.flip(3)
        if view.scale != 1:
            images = interpolate(images, content_hw, mode="bilinear", antialias=view.scale < 1)
        stride = self.detector.stride
        return pad(images, (0, -width % stride, 0, -height % stride), value=GREY / 255)


def to_canvas(boxes_xyxy: Tensor, view: View, canvas_hw: tuple[int, int]) -> Tensor:
    """Boxes (..., 4) in the pixels of a view to those of the canvas."""
    height, width = view.content_hw(canvas_hw)
    x1, y1, x2, y2 = boxes_xyxy.unbind(-1)
    if view.mirrored:
        x1, x2 = width - x2, width - x1
    across, down = canvas_hw[1] / width, canvas_hw[0] / height
    return torch.stack((x1 * across, y1 * down, x2 * across, y2 * down), -1)
