"""The drawings of detect.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.inference.detection_stream import FrameDetections
from engine.inference.results.drawing import draw_detections
from engine.inference.results.result_names import written_suffix
from engine.inference.sources.frames import FileProblem
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable
from utils.drawing.draw import encode_image
from utils.pixels import as_rgb8


@dataclass(frozen=True)
class DrawnFrame:
    """A frame with its detections, and the drawing or the error that prevented it."""

    detected: FrameDetections
    drawing: np.ndarray | None = None  # uint8 (H, W, 3) RGB, with the boxes; None: it is not needed
    encoded: bytes = b""  # the drawing as an image file
    error: Exception | None = None


class FrameDrawer:
    """Draws and encodes the boxes of frames, as the flags request. Several threads may call it at once."""

    def __init__(self, names: tuple[str, ...], config: DetectConfig) -> None:
        """``names``: class names."""
        self._names = names
        self._config = config

    def draw(self, item: FrameDetections | FileProblem) -> DrawnFrame | FileProblem:
        """Draws a frame, unless detection in it has failed."""
        if isinstance(item, FileProblem):
            return item
        is_unused = self._config.nosave and not self._config.view_img
        if is_unused or isinstance(item.outcome, Exception):
            return DrawnFrame(item)
        try:
            return self._draw_boxes(item, item.outcome)
        except Exception as error:
            return DrawnFrame(item, error=error)

    def _draw_boxes(self, item: FrameDetections, table: DetectionTable) -> DrawnFrame:
        config = self._config
        drawing = draw_detections(
            as_rgb8(item.frame.image),
            table.boxes_xyxy_px,
            classes=table.classes,
            scores=None if config.hide_conf else table.scores,
            tracks=item.tracks,
            names=None if config.hide_labels else self._names,
            line_width=config.line_thickness,
        )
        encoded = b""
        if not config.nosave and not item.frame.is_video:
            encoded = encode_image(drawing, written_suffix(item.frame.path), item.frame.path)
        is_needed = item.frame.is_video or config.view_img
        return DrawnFrame(item, drawing if is_needed else None, encoded)
