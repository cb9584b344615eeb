"""Detection in large images: a detector sees overlapping tiles at full resolution, and its detections are stitched.

Legend: T views of an image: its tiles, and perhaps the whole image reduced; K detections a view. All boxes are xyxy
pixels of the canvas, which is the image, padded right and below where it is smaller than a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from models.postprocess.detections import PostprocessSettings
from models.postprocess.stitching import stitch_views
from models.postprocess.tiles import Tiles
from utils.boxes import tile_windows
from utils.structures import GRAY, Detections, DetectionTable

Find = Callable[[nn.Module, list[Tensor]], dict[str, Detections]]
PARTS = len(Detections._fields)  # tensors of a selection


@dataclass(frozen=True, kw_only=True)
class ViewInput:
    """What a detector takes as views of an image."""

    stride: int  # sides are multiples of it, pixels
    imgsz: int  # longer side to which a whole image is scaled down, pixels
    only_hw: tuple[int, int] | None = None  # the only size that it takes, pixels; None: any
    batch: int  # views at a time


class TiledDetector(nn.Module):
    """Finds the objects of one large image at a time.

    Args:
        find: maps ``detector`` and its raw maps (float32) to detections in pixels of its input: one or several
            selections of the same boxes, by name.
        selections: how the detections of all views are joined, by the names of ``find``, see `stitch_views`.
    """

    def __init__(
        self,
        detector: nn.Module,
        find: Find,
        *,
        tiles: Tiles,
        view_input: ViewInput,
        selections: Mapping[str, PostprocessSettings],
    ) -> None:
        super().__init__()
        self.detector = detector
        self._find = find
        self._tiles = tiles
        self._input = view_input
        self._selections = dict(selections)

    def forward(self, images: Tensor) -> list[Tensor]:
        """An image float (1, 3, H, W) in [0, 1] to what `stitch` takes: all views' windows (T, 4), and for each
        selection their boxes (T, K, 4), scores (T, K), classes (T, K) and counts (T,)."""
        height, width = images.shape[2:]
        padding = (0, max(self._tiles.size - width, 0), 0, max(self._tiles.size - height, 0))
        images = pad(images, padding, value=GRAY / 255) if any(padding) else images
        canvas_hw = images.shape[2:]
        windows = tile_windows(canvas_hw, self._tiles.size, self._tiles.overlap)
        corners = torch.tensor(windows, dtype=torch.float32, device=images.device)
        views = []
        for start in range(0, len(windows), self._input.batch):
            part = windows[start : start + self._input.batch]
            found = self._detect_tiles(torch.cat([images[:, :, y1:y2, x1:x2] for x1, y1, x2, y2 in part]))
            origin = corners[start : start + self._input.batch, None, :2].repeat(1, 1, 2)
            views.append({name: d._replace(boxes_xyxy=d.boxes_xyxy + origin) for name, d in found.items()})
        if self._tiles.full_image and len(windows) > 1:
            views.append(self._detect_reduced(images))
            whole = corners.new_tensor([[0, 0, canvas_hw[1], canvas_hw[0]]])
            corners = torch.cat((corners, whole))
        joined = [corners]
        for name in self._selections:
            joined += [torch.cat(parts) for parts in zip(*(view[name] for view in views))]
        return joined

    def stitch(self, raw: list[Tensor]) -> dict[str, Detections]:
        """The image's detections on the host, B = 1, by selection, from what `forward` returns, which may have been
        converted to float."""
        windows, *parts = (t.cpu().numpy() for t in raw)
        found = {}
        for number, (name, settings) in enumerate(self._selections.items()):
            boxes, scores, classes, counts = parts[number * PARTS : (number + 1) * PARTS]
            view, slot = np.nonzero(np.arange(scores.shape[1]) < counts[:, None])
            table = DetectionTable(view, boxes[view, slot], scores[view, slot], classes[view, slot].astype(np.int64))
            joined = stitch_views(table, windows, settings)
            columns = (torch.from_numpy(t)[None] for t in (joined.boxes_xyxy_px, joined.scores, joined.classes))
            found[name] = Detections(*columns, torch.tensor([len(joined.scores)]))
        return found

    def _detect_tiles(self, tiles: Tensor) -> dict[str, Detections]:
        size = self._input.imgsz if self._tiles.scaled else self._tiles.size
        if size == self._tiles.size:
            return self._detect(tiles)
        found = self._detect(interpolate(tiles, (size, size), mode="bilinear"))
        gain = self._tiles.size / size
        return {name: d._replace(boxes_xyxy=d.boxes_xyxy * gain) for name, d in found.items()}

    def _detect(self, inputs: Tensor) -> dict[str, Detections]:
        raw = self.detector(inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            return self._find(self.detector, [level.float() for level in raw])

    def _detect_reduced(self, images: Tensor) -> dict[str, Detections]:
        """Detections in the whole image, scaled down, in its pixels."""
        height, width = images.shape[2:]
        limit_hw = self._input.only_hw or (self._input.imgsz, self._input.imgsz)
        gain = min(limit_hw[0] / height, limit_hw[1] / width, 1.0)
        small_hw = (max(round(height * gain), 1), max(round(width * gain), 1))
        small = interpolate(images, small_hw, mode="bilinear", antialias=gain < 1)
        stride = self._input.stride
        input_hw = self._input.only_hw or tuple(-(-side // stride) * stride for side in small_hw)
        padding = (0, input_hw[1] - small_hw[1], 0, input_hw[0] - small_hw[0])
        found = self._detect(pad(small, padding, value=GRAY / 255))
        gains = images.new_tensor([width / small_hw[1], height / small_hw[0]]).repeat(2)
        return {name: d._replace(boxes_xyxy=d.boxes_xyxy * gains) for name, d in found.items()}
