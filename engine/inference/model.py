"""Models for inference: checkpoints and exported files are called and decoded alike.

Legend: B images, N boxes, C classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.render.letterbox import CanvasRule
from models.detector import Detector
from models.postprocess.detections import DEFAULT_CONFIDENCE
from utils.config.settings import MAX_IMGSZ
from utils.errors import UserError, errors_of
from utils.logger import get_logger
from utils.machine.devices import resolve_amp
from utils.pixels import PixelFormat


class InferenceModel(nn.Module):
    """A detector for inference. Several threads may call one model."""

    path: Path  # of its file or folder
    format: str  # "checkpoint", or the key of `EXPORT_FORMATS`
    names: tuple[str, ...]  # of the classes
    pixels: PixelFormat  # of the images
    stride: int  # canvas sides must be multiples of it
    imgsz: int  # longer side of the canvas that the model is meant for, pixels
    input_hw: tuple[int, int] | None  # the only canvas that the model takes, pixels; None: any multiple of ``stride``
    batch: int | None  # the number of images that the file takes at once; None: any. `forward` takes any number
    nms_iou: float | None  # the IoU threshold of NMS in validation; None if the detections need no NMS
    ignores_nms: bool = False  # a checkpoint with one branch, for which ``nms`` of `open_model` does nothing
    votes: bool  # box voting is inside, so that it cannot be left out
    validation_iou: float  # as published for the model's head, whether or not NMS is needed
    squares: bool  # images are padded to squares
    # Thresholds of detection with the best F1 in validation, with box voting and without; None if unknown.
    confidence: float | None
    plain_confidence: float | None
    info: dict[str, Any]  # the checkpoint's content, or the metadata of an exported file
    device: torch.device  # where images are expected and outputs are

    def stored(self, key: str) -> Any:
        """Returns what training stored as ``key``, in the checkpoint or its settings, or in the details of an exported
        file; None if it stored nothing, or an empty or false value."""
        for part in (self.info, self.info.get("config", {}), self.info.get("details", {})):
            if part.get(key):
                return part[key]
        return None

    def stored_words(self, key: str) -> list[str]:
        """As `stored`, for a list of words."""
        words = self.stored(key)
        return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []

    @property
    def tile(self) -> int:
        """The side of the tiles on which the model was trained, pixels; 0: whole images."""
        value = self.stored("tile")
        return value if type(value) is int and 0 < value <= MAX_IMGSZ else 0

    @property
    def num_classes(self) -> int:
        return len(self.names)

    def canvases(self, imgsz: int, *, rect: bool | None = None) -> CanvasRule:
        """The canvases of images whose longer side is scaled to ``imgsz`` pixels. ``rect``: rectangles, or squares;
        None: as the model's head was trained."""
        is_square = self.squares if rect is None else not rect
        return CanvasRule(imgsz, self.stride, is_square, self.input_hw)

    def threshold(self, *, box_voting: bool) -> float:
        """The confidence threshold of detection with or without box voting, unless the user sets another one."""
        best = self.confidence
        if not box_voting and self.plain_confidence is not None:
            best = self.plain_confidence
        return DEFAULT_CONFIDENCE if best is None else best

    @property
    def spec(self) -> dict[str, Any]:
        """What tells the model from others: the detector's spec, or the metadata of an exported file."""
        return self.info

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images float32 (B, C, H, W) in [0, 1], RGB or of other `pixels`, to raw outputs, which `decode` takes."""
        raise NotImplementedError

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Raw outputs to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        raise NotImplementedError


def _confidence_of(progress: dict[str, Any], name: str) -> float | None:
    """A threshold in a checkpoint's progress; None if it is not known."""
    value = progress.get(name)
    return value if isinstance(value, float) and 0 <= value <= 1 else None


def autocast_type(model: InferenceModel, amp: str) -> torch.dtype | None:
    """The autocast type of ``model`` for ``--amp``; None: its own type. float16 on a CPU is float32, which is logged.
    Raises UserError for a type that an exported file does not take."""
    if model.format != "checkpoint":
        if amp in ("bf16", "fp16"):
            raise UserError(f"--amp {amp}: {model.path} computes in the type it was exported with; leave it out")
        return None
    if amp == "fp16" and model.device.type == "cpu":
        get_logger().warning("float16 (--half, --amp fp16) is not supported on CPUs; computing in float32")
        return None
    return resolve_amp(amp, model.device)


class CheckpointModel(InferenceModel):
    """A detector of a checkpoint, fused, on its device in NHWC memory format."""

    def __init__(self, detector: Detector, info: dict[str, Any], path: Path, device: torch.device) -> None:
        """``detector``: fused, see `Detector.fuse`."""
        super().__init__()
        self.detector = detector.to(device, memory_format=torch.channels_last)
        self.path = path
        self.format = "checkpoint"
        self.device = device
        self.info = info
        self.names = detector.names
        self.stride = detector.stride
        self.imgsz = info["imgsz"]
        with errors_of(path):
            self.pixels = PixelFormat.checked(detector.channels, info.get("bits", 8), "images")
        self.input_hw = self.batch = None
        self.nms_iou = detector.nms_iou
        self.validation_iou = detector.head.validation_iou
        self.votes = False
        self.squares = detector.head.squares
        self.ignores_nms = not detector.spec.get("end2end")
        progress = info.get("progress", {})
        self.confidence = _confidence_of(progress, "confidence")
        self.plain_confidence = _confidence_of(progress, "plain_confidence")
        self.scored_confidence = _confidence_of(progress, "scored_confidence")  # under the NMS of validation

    @property
    def spec(self) -> dict[str, Any]:
        return self.detector.spec

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.detector(images)

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.detector.decode(raw)
