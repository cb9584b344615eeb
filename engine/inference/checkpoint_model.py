"""A detector from a checkpoint, for inference.

Legend: B images, N boxes, C classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.detector import Detector
from models.weights.load import load_detector


class InferenceModel(nn.Module):
    """A fused detector on its device, in NHWC memory format. Several threads may call one model.

    Attributes:
        path: its file.
        format: "checkpoint".
        names: of the classes.
        stride: canvas sides must be multiples of this.
        imgsz: the longer side of the canvas that the model is meant for, pixels.
        input_hw: the only canvas that the model takes, height and width in pixels; None: any multiple of ``stride``.
        batch: the number of images that the file takes at once; None: any. `forward` takes any number in either case.
        nms_iou: the IoU threshold of NMS in validation; None if the detections need no NMS.
        confidence: the threshold with the best F1 in validation; None if unknown.
        device: where images are expected and outputs are.
    """

    input_hw: tuple[int, int] | None
    batch: int | None

    def __init__(self, detector: Detector, info: dict[str, Any], path: Path, device: torch.device) -> None:
        """``detector``: fused, see `Detector.fuse`."""
        super().__init__()
        self.detector = detector.to(device, memory_format=torch.channels_last)
        self.path, self.format, self.device, self.info = path, "checkpoint", device, info
        self.names, self.stride, self.imgsz = detector.names, detector.stride, info["imgsz"]
        self.input_hw = self.batch = None
        self.nms_iou = None if detector.head.is_end_to_end else detector.head.validation_iou
        stored = info.get("progress", {}).get("confidence")
        self.confidence = stored if isinstance(stored, float) and 0 <= stored <= 1 else None

    @property
    def num_classes(self) -> int:
        return len(self.names)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images float32 (B, 3, H, W) in [0, 1], RGB, to raw outputs, which `decode` takes."""
        return self.detector(images)

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Raw outputs to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        return self.detector.decode(raw)


def open_model(path: str | Path, *, device: torch.device, nms: bool = False) -> InferenceModel:
    """A model for inference on ``device``.

    ``nms``: use the one-to-many branch of a head with two; its detections need NMS. Raises UserError for a missing,
    damaged or unfit file.
    """
    detector, info = load_detector(path)
    return InferenceModel(detector.fuse(one_to_one=not nms), info, Path(path), device)
