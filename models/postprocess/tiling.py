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

from models.postprocess.selection import PostprocessSettings
from models.postprocess.stitching import stitch_views
from models.postprocess.tiles import Tiles
from utils.boxes import tile_windows
from utils.detections import Detections, DetectionTable
from utils.pixels import GRAY

SelectFromRaw = Callable[[nn.Module, list[Tensor]], dict[str, Detections]]
TENSORS_PER_SELECTION = len(Detections._fields)


@dataclass(frozen=True, kw_only=True)
class ViewInput:
    """Input of a detector that sees views of an image."""

    stride: int  # sides are multiples of it, pixels
    imgsz: int  # longer side to which a whole image is scaled down, pixels
    only_hw: tuple[int, int] | None = None  # the only accepted size, pixels; None: any
    batch: int  # views per call


class TiledDetector(nn.Module):
    """Finds the objects of one large image at a time.

    Args:
        select: maps ``detector`` and its raw maps (float32) to detections in pixels of its input: one or several
            selections of the same boxes, by name.
        selections: how to join the detections of all views, by the names that ``select`` returns, see `stitch_views`.
    """

    def __init__(
        self,
        detector: nn.Module,
        select: SelectFromRaw,
        *,
        tiles: Tiles,
        view_input: ViewInput,
        selections: Mapping[str, PostprocessSettings],
    ) -> None:
        super().__init__()
        self.detector = detector
        self._select = select
        self._tiles = tiles
        self._input = view_input
        self._selections = dict(selections)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Runs detection on all views of an image.

        Args:
            images: float (1, channels, H, W) in [0, 1].

        Returns the input of `stitch`: the windows of all views (T, 4), then for each selection their boxes (T, K, 4),
        scores (T, K), classes (T, K) and counts (T,).
        """
        height, width = images.shape[2:]
        padding = (0, max(self._tiles.size - width, 0), 0, max(self._tiles.size - height, 0))
        if any(padding):
            images = pad(images, padding, value=GRAY / 255)
        canvas_height, canvas_width = images.shape[2:]
        windows = tile_windows((canvas_height, canvas_width), self._tiles.size, self._tiles.overlap)
        corners = torch.tensor(windows, dtype=torch.float32, device=images.device)
        views = []
        for start in range(0, len(windows), self._input.batch):
            chunk = windows[start : start + self._input.batch]
            selected = self._detect_tiles(torch.cat([images[:, :, y1:y2, x1:x2] for x1, y1, x2, y2 in chunk]))
            origin = corners[start : start + self._input.batch, None, :2].repeat(1, 1, 2)
            views.append({name: d._replace(boxes_xyxy=d.boxes_xyxy + origin) for name, d in selected.items()})
        if self._tiles.full_image and len(windows) > 1:
            views.append(self._detect_reduced(images))
            whole_image = corners.new_tensor([[0, 0, canvas_width, canvas_height]])
            corners = torch.cat((corners, whole_image))
        joined = [corners]
        for name in self._selections:
            joined += [torch.cat(tensors) for tensors in zip(*(view[name] for view in views))]
        return joined

    def stitch(self, raw: list[Tensor]) -> dict[str, Detections]:
        """Joins the outputs of `forward`, which may have been converted to float, to the image's detections.

        Returns them on the host, B = 1, by selection.
        """
        windows, *columns = (t.cpu().numpy() for t in raw)
        stitched = {}
        for number, (name, settings) in enumerate(self._selections.items()):
            first = number * TENSORS_PER_SELECTION
            boxes, scores, classes, counts = columns[first : first + TENSORS_PER_SELECTION]
            view, slot = np.nonzero(np.arange(scores.shape[1]) < counts[:, None])
            table = DetectionTable(view, boxes[view, slot], scores[view, slot], classes[view, slot].astype(np.int64))
            joined = stitch_views(table, windows, settings)
            stitched[name] = Detections(
                boxes_xyxy=torch.from_numpy(joined.boxes_xyxy_px)[None],
                scores=torch.from_numpy(joined.scores)[None],
                classes=torch.from_numpy(joined.classes)[None],
                counts=torch.tensor([len(joined.scores)]),
            )
        return stitched

    def _detect_tiles(self, tiles: Tensor) -> dict[str, Detections]:
        size = self._input.imgsz if self._tiles.scaled else self._tiles.size
        if size == self._tiles.size:
            return self._detect(tiles)
        selected = self._detect(interpolate(tiles, (size, size), mode="bilinear"))
        gain = self._tiles.size / size
        return {name: d._replace(boxes_xyxy=d.boxes_xyxy * gain) for name, d in selected.items()}

    def _detect(self, inputs: Tensor) -> dict[str, Detections]:
        raw = self.detector(inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            return self._select(self.detector, [level.float() for level in raw])

    def _detect_reduced(self, images: Tensor) -> dict[str, Detections]:
        """Runs detection on the whole image, scaled down. Returns boxes in pixels of ``images``."""
        height, width = images.shape[2:]
        limit_hw = self._input.only_hw or (self._input.imgsz, self._input.imgsz)
        gain = min(limit_hw[0] / height, limit_hw[1] / width, 1.0)
        small_hw = (max(round(height * gain), 1), max(round(width * gain), 1))
        small = interpolate(images, small_hw, mode="bilinear", antialias=gain < 1)
        stride = self._input.stride
        input_hw = self._input.only_hw or tuple(-(-side // stride) * stride for side in small_hw)
        padding = (0, input_hw[1] - small_hw[1], 0, input_hw[0] - small_hw[0])
        selected = self._detect(pad(small, padding, value=GRAY / 255))
        gains = images.new_tensor([width / small_hw[1], height / small_hw[0]]).repeat(2)
        return {name: d._replace(boxes_xyxy=d.boxes_xyxy * gains) for name, d in selected.items()}
