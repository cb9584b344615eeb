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
from models.postprocess.selection import DEFAULT_CONFIDENCE
from utils.config.settings import MAX_IMGSZ
from utils.errors import UserError, errors_of
from utils.logger import get_logger
from utils.machine.devices import resolve_amp
from utils.pixels import PixelFormat

AMP_TYPES = ("auto", "off", "bf16", "fp16")


class InferenceModel(nn.Module):
    """A detector for inference. Several threads may call one model."""

    path: Path  # file or folder
    format: str  # "checkpoint", or the key of `EXPORT_FORMATS`
    names: tuple[str, ...]  # class names
    pixels: PixelFormat
    stride: int  # canvas sides must be multiples of it
    imgsz: int  # longer side of the canvas that the model is meant for, pixels
    input_hw: tuple[int, int] | None  # the only canvas that the model takes, pixels; None: any multiple of ``stride``
    batch: int | None  # number of images that the file takes at once; None: any. `forward` takes any number
    nms_iou: float | None  # IoU threshold of NMS in validation; None if the detections need no NMS
    ignores_nms: bool = False  # a checkpoint with one branch, for which ``nms`` of `open_model` does nothing
    is_unscored_branch: bool = False  # the one-to-many branch of an NMS-free head (``nms``): training does not score it
    validation_iou: float  # as published for the model's head, whether or not NMS is needed
    squares: bool  # images are padded to squares
    confidence: float | None  # threshold with the best F1 in validation with box voting; None: unknown
    plain_confidence: float | None  # the same without box voting
    info: dict[str, Any]  # the checkpoint's content, or the metadata of an exported file
    device: torch.device  # device of inputs and outputs
    _warned_sizes: frozenset[int] = frozenset()

    def stored(self, key: str) -> Any:
        """Returns what training stored as ``key``, in the checkpoint or its settings, or in the details of an exported
        file; None if it stored nothing."""
        for entries in (self.info, self.info.get("config", {}), self.info.get("details", {})):
            if entries.get(key) is not None:
                return entries[key]
        return None

    def stored_words(self, key: str) -> list[str]:
        """Returns the strings in the list that `stored` returns."""
        words = self.stored(key)
        return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []

    @property
    def tile(self) -> int:
        """Side of the tiles on which the model was trained, pixels; 0: whole images."""
        value = self.stored("tile")
        return value if type(value) is int and 0 < value <= MAX_IMGSZ else 0

    @property
    def trained_classes(self) -> list[str]:
        """Names of the classes that ``--classes`` of the training chose; empty: all."""
        return self.stored_words("used_classes")

    @property
    def has_merged_classes(self) -> bool:
        """True if all classes of its data set count as one (``--single-cls`` of the training)."""
        return self.stored("single_cls") is True

    @property
    def has_kept_classes(self) -> bool:
        """True if it has classes of a teacher which its data set may not label (``--keep-old`` of the training)."""
        return self.stored("keep_old") is True

    @property
    def num_classes(self) -> int:
        return len(self.names)

    def canvases(self, imgsz: int, *, rect: bool | None = None) -> CanvasRule:
        """Returns the rule for canvases of images whose longer side is scaled to ``imgsz`` pixels.

        ``rect``: True for rectangles, False for squares; None: as the model's head was trained.
        """
        is_square = self.squares if rect is None else not rect
        return CanvasRule(imgsz, self.stride, is_square, self.input_hw)

    def threshold(self, *, box_voting: bool) -> float:
        """Returns the default confidence threshold of detection, with or without box voting."""
        best = self.confidence
        if not box_voting and self.plain_confidence is not None:
            best = self.plain_confidence
        return DEFAULT_CONFIDENCE if best is None else best

    def warn_of_size(self, imgsz: int) -> None:
        """Warns, once for each size, that ``threshold`` was measured at another size than ``imgsz``, pixels."""
        if self.confidence is None or imgsz == self.imgsz or imgsz in self._warned_sizes:
            return
        self._warned_sizes |= {imgsz}
        message = "%s: its confidence threshold was measured at %d pixels; at %d another may be better: set one"
        get_logger().warning(message, self.path, self.imgsz, imgsz)

    @property
    def spec(self) -> dict[str, Any]:
        """Identity of the model: the detector's spec, or the metadata of an exported file."""
        return self.info

    def forward(self, images: Tensor) -> list[Tensor]:
        """Computes raw outputs, which `decode` takes, from images float32 (B, C, H, W) in [0, 1], RGB or of other
        `pixels`."""
        raise NotImplementedError

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw outputs to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        raise NotImplementedError


def autocast_type(model: InferenceModel, amp: str) -> torch.dtype | None:
    """Returns the autocast type of ``model`` for ``--amp``; None: no autocast.

    float16 on a CPU is replaced by float32 with a warning. Raises UserError for an unknown type, and for "bf16" or
    "fp16" with an exported file.
    """
    if amp not in AMP_TYPES:
        raise UserError(f"amp: must be one of {', '.join(AMP_TYPES)}, got {amp!r}")
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

    scored_confidence: float | None  # as `confidence`, for the boxes whose AP is computed; None: unknown

    def __init__(self, detector: Detector, info: dict[str, Any], path: Path, device: torch.device) -> None:
        """``detector``: fused, see `Detector.fuse`."""
        super().__init__()
        self.detector = detector.to(device).to(memory_format=torch.channels_last)
        self.path = path
        self.format = "checkpoint"
        self.device = device
        self.info = info
        self.names = detector.names
        self.stride = detector.stride
        self.imgsz = info["imgsz"]
        with errors_of(path):
            self.pixels = PixelFormat.checked(detector.channels, info.get("bits", 8), "images")
        self.input_hw = None
        self.batch = None
        self.nms_iou = detector.nms_iou
        self.validation_iou = detector.head.validation_iou
        self.squares = detector.head.squares
        self.ignores_nms = not detector.spec.get("end2end")
        self.is_unscored_branch = not self.ignores_nms and self.nms_iou is not None
        # Training stores the thresholds of the branch that it validates.
        stored = {} if self.is_unscored_branch else info.get("progress", {})
        thresholds = {name: value for name, value in stored.items() if isinstance(value, float) and 0 <= value <= 1}
        self.confidence = thresholds.get("confidence")
        self.plain_confidence = thresholds.get("plain_confidence")
        self.scored_confidence = thresholds.get("scored_confidence")

    @property
    def spec(self) -> dict[str, Any]:
        return self.detector.spec

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.detector(images)

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.detector.decode(raw)
