"""Test-time augmentation: one NMS for a detector's boxes in several views of an image, mirrored and enlarged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from models.detector import Detector
from utils.mirrored_classes import mirrored_classes
from utils.pixels import GRAY


class View(NamedTuple):
    """Transformed canvas. Its sides are whole pixels, so they are not scaled by exactly the same factor."""

    scale: float
    mirrored: bool  # whether left and right are exchanged

    def content_hw(self, canvas_hw: tuple[int, int]) -> tuple[int, int]:
        """Returns height and width of the scaled canvas, which is then padded to whole strides on the right and
        below."""
        height, width = (max(round(side * self.scale), 1) for side in canvas_hw)
        return height, width


# Chosen by measurement: benchmarks/LOG.md. The first view is the image itself, whose maps give the canvas size.
VIEWS = (View(1.0, False), View(1.0, True), View(1.25, True))


class TestTimeAugmentation(nn.Module):
    """Wraps a `Detector` for inference, and is called and decoded like it.

    Raw maps are those of all `VIEWS`; boxes are in canvas pixels. In a mirrored view, classes such as "left arrow" and
    "right arrow" (`mirrored_classes`) have each other's scores.
    """

    __test__ = False  # keeps pytest from collecting a class called Test...

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector
        self._class_in_mirror = list(range(len(detector.names)))
        for one, other in mirrored_classes(detector.names, "fliplr"):
            i, j = detector.names.index(one), detector.names.index(other)
            self._class_in_mirror[i], self._class_in_mirror[j] = j, i

    @property
    def nms_iou(self) -> float | None:
        return self.detector.nms_iou

    def forward(self, images: Tensor) -> list[Tensor]:
        """Computes the raw maps of all views, from images float (B, channels, H, W) in [0, 1], with H and W multiples
        of the stride."""
        return [level for view in VIEWS for level in self.detector(self._transform(images, view))]

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw maps to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C).

        N runs over the views, then over a view's predictions.
        """
        levels = len(raw) // len(VIEWS)
        rows, columns = raw[0].shape[2:]
        canvas_hw = (rows * self.detector.strides[0], columns * self.detector.strides[0])
        boxes: list[Tensor] = []
        scores: list[Tensor] = []
        for number, view in enumerate(VIEWS):
            view_boxes, view_scores = self.detector.decode(raw[number * levels : (number + 1) * levels])
            boxes.append(to_canvas(view_boxes, view, canvas_hw))
            scores.append(view_scores[..., self._class_in_mirror] if view.mirrored else view_scores)
        return torch.cat(boxes, 1), torch.cat(scores, 1)

    def _transform(self, images: Tensor, view: View) -> Tensor:
        """Mirrors, scales and pads the canvas."""
        canvas_height, canvas_width = images.shape[2:]
        height, width = view.content_hw((canvas_height, canvas_width))
        if view.mirrored:
            images = images.flip(3)
        if view.scale != 1:
            images = interpolate(images, (height, width), mode="bilinear")
        stride = self.detector.stride
        return pad(images, (0, -width % stride, 0, -height % stride), value=GRAY / 255)


def to_canvas(boxes_xyxy: Tensor, view: View, canvas_hw: tuple[int, int]) -> Tensor:
    """Converts boxes (..., 4) from pixels of a view to canvas pixels."""
    height, width = view.content_hw(canvas_hw)
    x1, y1, x2, y2 = boxes_xyxy.unbind(-1)
    if view.mirrored:
        x1, x2 = width - x2, width - x1
    gain_x, gain_y = canvas_hw[1] / width, canvas_hw[0] / height
    return torch.stack((x1 * gain_x, y1 * gain_y, x2 * gain_x, y2 * gain_y), -1)
