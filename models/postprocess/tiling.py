"""Detection in large images: a detector sees overlapping tiles at full resolution, and its detections are stitched.

Legend: T views of an image: its tiles, and perhaps the whole image reduced; K detections a view. All boxes are xyxy
pixels of the canvas, which is the image, padded right and below where it is smaller than a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from models.detector import Detector
from models.postprocess.stitching import stitch_views
from models.postprocess.tta import TestTimeAugmentation
from utils.structures import GREY, Detections

Find = Callable[[nn.Module, list[Tensor]], Detections]


def tile_windows(canvas_hw: tuple[int, int], tile: int, overlap: float) -> list[tuple[int, int, int, int]]:
    """The corners x1, y1, x2, y2 of square tiles that cover a canvas, row by row. Neighbors overlap by the fraction
    ``overlap`` of a tile, and the last tile of a row or column, which ends at the border, by as much or more.

    Args:
        canvas_hw: each at least ``tile``.
        tile: side, pixels.
        overlap: at least 0 and less than 1.
    """
    step = max(tile - round(tile * overlap), 1)
    tops, lefts = ([min(step * i, side - tile) for i in range(-(-(side - tile) // step) + 1)] for side in canvas_hw)
    return [(left, top, left + tile, top + tile) for top in tops for left in lefts]


class TiledDetector(nn.Module):
    """Finds the objects of one large image at a time.

    Args:
        detector: for inference.
        find: maps ``detector`` and its raw maps (float32) to detections in pixels of its input.
        stride: of the detector, which the sides of its input must be multiples of.
        tile: side of the tiles, a multiple of ``stride``.
        overlap: of neighboring tiles, as a fraction of a tile.
        batch: views that the detector sees at a time.
        full_image: also show the detector the whole image, its longer side reduced to so many pixels; 0: do not.
        iou_thres, max_det, agnostic: see `stitch_views`.
    """

    def __init__(
        self,
        detector: Detector | TestTimeAugmentation,
        find: Find,
        *,
        stride: int,
        tile: int,
        overlap: float,
        batch: int,
        full_image: int = 0,
        iou_thres: float | None,
        max_det: int,
        agnostic: bool = False,
    ) -> None:
        super().__init__()
        self.detector = detector
        self._find, self._stride, self._batch = find, stride, batch
        self._tile, self._overlap, self._full_image = tile, overlap, full_image
        self._options = {"iou_thres": iou_thres, "max_det": max_det, "agnostic": agnostic}

    def forward(self, images: Tensor) -> list[Tensor]:
        """An image float (1, 3, H, W) in [0, 1] to what `stitch` takes: all views' boxes (T, K, 4), scores (T, K),
        classes (T, K), counts (T,) and windows (T, 4)."""
        height, width = images.shape[2:]
        padding = (0, max(self._tile - width, 0), 0, max(self._tile - height, 0))
        images = pad(images, padding, value=GREY / 255) if any(padding) else images
        canvas_hw = images.shape[2:]
        windows = tile_windows(canvas_hw, self._tile, self._overlap)
        found = [
            self._detect(torch.cat([images[:, :, y1:y2, x1:x2] for x1, y1, x2, y2 in windows[start:][: self._batch]]))
            for start in range(0, len(windows), self._batch)
        ]
        corners = torch.tensor(windows, dtype=torch.float32, device=images.device)
        boxes, scores, classes, counts = (torch.cat(parts) for parts in zip(*found))
        boxes = boxes + corners[:, None, :2].repeat(1, 1, 2)
        views = Detections(boxes, scores, classes, counts)
        if self._full_image and len(windows) > 1:
            views = Detections(*(torch.cat(parts) for parts in zip(views, self._detect_reduced(images))))
            whole = corners.new_tensor([[0, 0, canvas_hw[1], canvas_hw[0]]])
            corners = torch.cat((corners, whole))
        return [*views, corners]

    def stitch(self, raw: list[Tensor]) -> Detections:
        """The image's detections, B = 1, from what `forward` returns, which may have been converted to float."""
        boxes, scores, classes, counts, windows = raw
        return stitch_views(Detections(boxes, scores, classes.long(), counts.long()), windows, **self._options)

    def _detect(self, inputs: Tensor) -> Detections:
        raw = self.detector(inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            return self._find(self.detector, [level.float() for level in raw])

    def _detect_reduced(self, images: Tensor) -> Detections:
        height, width = images.shape[2:]
        gain = min(self._full_image / max(height, width), 1.0)
        small_hw = (max(round(height * gain), 1), max(round(width * gain), 1))
        small = interpolate(images, small_hw, mode="bilinear", antialias=gain < 1)
        padding = (0, -small_hw[1] % self._stride, 0, -small_hw[0] % self._stride)
        boxes, scores, classes, counts = self._detect(pad(small, padding, value=GREY / 255))
        gains = boxes.new_tensor([width / small_hw[1], height / small_hw[0]]).repeat(2)
        return Detections(boxes * gains, scores, classes, counts)
