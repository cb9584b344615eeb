"""Models for inference: checkpoints and exported files are called and decoded alike.

Legend: B images, N boxes, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.inference.runtimes.metadata import ExportMetadata
from models.detector import Detector
from utils.boxes import cxcywh_to_xyxy
from utils.config.pixels import PixelFormat
from utils.config.settings import MOST_IMGSZ
from utils.errors import UserError, errors_of
from utils.logger import get_logger
from utils.machine.amp import resolve_amp
from utils.machine.limits import explanation
from utils.strings import counted

FIRST_CANDIDATES = 300  # rows of an end-to-end output, by convention
FOREIGN_IOU = 0.7  # NMS threshold in validation for files that state none


class InferenceModel(nn.Module):
    """A detector for inference. Several threads may call one model.

    Attributes:
        path: its file or folder.
        format: "checkpoint", "onnx", "openvino", "torchscript" or "pt2".
        names: of the classes.
        pixels: of the images.
        stride: canvas sides must be multiples of this.
        imgsz: the longer side of the canvas that the model is meant for, pixels.
        input_hw: the only canvas that the model takes, height and width in pixels; None: any multiple of ``stride``.
        batch: the number of images that the file takes at once; None: any. `forward` takes any number in either case.
        nms_iou: the IoU threshold of NMS in validation; None if the detections need no NMS.
        ignores_nms: whether it is a checkpoint with one branch, for which ``nms`` of `open_model` does nothing.
        votes: whether box voting is inside, so that it cannot be left out.
        validation_iou: as published for the model's head, whether or not NMS is needed.
        squares: whether validation pads images to squares by default.
        confidence: the threshold with the best F1 in validation; None if unknown.
        info: the checkpoint's content, or the metadata of an exported file.
        device: where images are expected and outputs are.
    """

    path: Path
    format: str
    names: tuple[str, ...]
    pixels: PixelFormat
    stride: int
    imgsz: int
    input_hw: tuple[int, int] | None
    batch: int | None
    nms_iou: float | None
    ignores_nms: bool = False
    votes: bool
    validation_iou: float
    squares: bool
    confidence: float | None
    info: dict[str, Any]
    device: torch.device

    @property
    def tile(self) -> int:
        """The side of the tiles on which the model was trained, pixels; 0: whole images."""
        value = self.info.get("tile") or self.info.get("details", {}).get("tile")
        return value if type(value) is int and 0 < value <= MOST_IMGSZ else 0

    @property
    def num_classes(self) -> int:
        return len(self.names)

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


def autocast_type(model: InferenceModel, amp: str) -> torch.dtype | None:
    """The autocast type of ``model`` for ``--amp``, None for its own type. float16 on a CPU, which `--half` asks for by
    habit, is float32 with a line in the log."""
    if model.format != "checkpoint":
        return None
    if amp == "fp16" and model.device.type == "cpu":
        get_logger().warning("float16 (--half, --amp fp16): not on a CPU, which computes in float32")
        return None
    return resolve_amp(amp, model.device)


class CheckpointModel(InferenceModel):
    """A detector of a checkpoint, fused, on its device in NHWC memory format."""

    def __init__(self, detector: Detector, info: dict[str, Any], path: Path, device: torch.device) -> None:
        """``detector``: fused, see `Detector.fuse`."""
        super().__init__()
        self.detector = detector.to(device, memory_format=torch.channels_last)
        self.path, self.format, self.device, self.info = path, "checkpoint", device, info
        self.names, self.stride, self.imgsz = detector.names, detector.stride, info["imgsz"]
        with errors_of(path):
            self.pixels = PixelFormat.checked(detector.channels, info.get("bits", 8), "images")
        self.input_hw = self.batch = None
        self.nms_iou, self.validation_iou, self.votes = detector.nms_iou, detector.head.validation_iou, False
        self.squares = detector.head.squares
        self.ignores_nms = not detector.spec.get("end2end")
        stored = info.get("progress", {}).get("confidence")
        self.confidence = stored if isinstance(stored, float) and 0 <= stored <= 1 else None

    @property
    def spec(self) -> dict[str, Any]:
        return self.detector.spec

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.detector(images)

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.detector.decode(raw)


@dataclass(frozen=True)
class Session:
    """An exported file, opened by its runtime."""

    format: str
    run: Callable[[Tensor], Tensor]  # float32 (B, C, H, W) to the output, on the same device; thread-safe
    metadata: dict[str, Any]  # text by key; plain data if it was read from a YAML
    input_shape: tuple[int | None, ...] | None  # B, C, H, W; None: any; torch's formats leave it to the metadata


class ExportedModel(InferenceModel):
    """An exported file. Batches are padded or cut to the number of images that it takes.

    A pickled model names its file, which is opened again when it is unpickled: runtimes cannot be pickled.
    """

    def __init__(
        self,
        session: Session,
        metadata: ExportMetadata,
        path: Path,
        device: torch.device,
        reopen: Callable[[], InferenceModel],
    ) -> None:
        """Raises UserError for a file that is not a detector of images, or takes no canvas of its own stride.

        Args:
            reopen: opens the file again, from any working folder.
        """
        super().__init__()
        self._reopen = reopen
        self.path, self.format, self.device = path, session.format, device
        self.info, self._run = metadata.as_dict(), session.run
        self.batch, channels, height, width = session.input_shape or metadata.input_shape
        if channels not in (None, metadata.channels):
            expected = f"not {metadata.channels}, as its metadata says" if metadata.is_ours else "not RGB"
            raise UserError(f"{path}: takes images of {counted(channels, 'channel')}, {expected}")
        self.pixels = PixelFormat(metadata.channels, metadata.bits)
        self.input_hw = None if height is None or width is None else (height, width)
        self.stride = metadata.stride
        shape = self.input_hw or metadata.imgsz_hw or (640, 640)
        self.imgsz = max(shape)
        self._layout, self.names = _recognize(self._probe(shape), metadata, path)
        is_final = self._layout == "rows" and not metadata.is_ours
        default = None if metadata.is_ours or is_final or metadata.end2end else FOREIGN_IOU
        self.nms_iou = metadata.nms_iou if metadata.is_ours else default
        self.votes, self.validation_iou = metadata.box_voting, metadata.validation_iou or FOREIGN_IOU
        self.squares, self.confidence = metadata.squares, metadata.confidence

    def __reduce__(self) -> tuple[Callable[[], InferenceModel], tuple[()]]:
        return self._reopen, ()

    def _probe(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the output for one gray image."""
        stride = self.stride
        height, width = shape if self.input_hw else (-(-side // stride) * stride for side in shape)
        try:
            images = torch.full(
                (self.batch or 1, self.pixels.channels, height, width), 0.5, dtype=torch.float32, device=self.device
            )
            with torch.inference_mode():
                return tuple(self._run_batch(images).shape)
        except UserError:
            raise
        except Exception as error:  # each runtime raises types of its own
            reason = explanation(error) or " ".join(str(error).split())[:300]
            raise UserError(f"{self.path}: cannot process an image of {height}x{width} pixels ({reason})") from None

    def forward(self, images: Tensor) -> list[Tensor]:
        hw = tuple(images.shape[2:])
        if self.input_hw not in (None, hw):
            raise UserError(
                f"{self.path}: takes canvases of {_text(self.input_hw)} pixels (height x width), not {_text(hw)}"
            )
        images = images.float()
        if self.batch in (None, len(images)):
            return [self._run_batch(images)]
        return [torch.cat([self._run_padded(part) for part in images.split(self.batch)])]

    def _run_padded(self, images: Tensor) -> Tensor:
        missing = self.batch - len(images)
        padded = torch.cat((images, images.new_zeros((missing, *images.shape[1:])))) if missing else images
        return self._run_batch(padded)[: len(images)]

    def _run_batch(self, images: Tensor) -> Tensor:
        output = self._run(images)
        if output.ndim == 3 and len(output) != len(images):
            raise UserError(f"{self.path}: returns {len(output)} outputs for {len(images)} images")
        return output

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        output = raw[0].float()
        if self._layout == "rows":  # x1, y1, x2, y2, score, class
            boxes, scores, classes = output.split((4, 1, 1), -1)
            unknown = ~((classes > -0.5) & (classes < self.num_classes - 0.5)) & (scores > 0)
            if unknown.any():
                number, last = classes[unknown][0].item(), self.num_classes - 1
                raise UserError(f"{self.path}: detects the class {number:g}, but its classes are 0 to {last}")
            columns = scores.new_zeros((*scores.shape[:2], self.num_classes))
            numbers = classes.nan_to_num().round().long().clamp(0, self.num_classes - 1)
            return boxes, columns.scatter(-1, numbers, scores)
        if self._layout == "objectness":  # cx, cy, w, h, objectness, classes
            boxes, objectness, classes = output.split((4, 1, self.num_classes), -1)
            return cxcywh_to_xyxy(boxes), objectness * classes
        boxes, scores = output.transpose(1, 2).split((4, self.num_classes), -1)
        return cxcywh_to_xyxy(boxes), scores.contiguous()


def _text(hw: tuple[int, ...]) -> str:
    return "x".join(map(str, hw))


def _recognize(shape: tuple[int, ...], metadata: ExportMetadata, path: Path) -> tuple[str, tuple[str, ...]]:
    """How to decode an output of this shape, "columns", "objectness" or "rows", and the class names. Raises UserError
    for a shape that no detector's output has."""
    if len(shape) != 3:
        raise UserError(f"{path}: its output {list(shape)} is not one of a detector")
    _, rows, width = shape
    count = None if metadata.names is None else len(metadata.names)
    if metadata.is_ours:
        layout = "columns" if metadata.layout == "raw" else "rows"
    elif width == 6 and (metadata.end2end or rows == FIRST_CANDIDATES or count != 1):
        layout = "rows"
    elif count is None:
        layout = "columns" if rows < width else "objectness"
    else:
        layout = "columns" if rows == 4 + count else "objectness"
    if count is None:
        if layout == "rows":
            raise UserError(f"{path}: holds no class names, nor their number; export it with its metadata")
        count = rows - 4 if layout == "columns" else width - 5
        get_logger().info("%s: no class names in the file; they are numbered (%s)", path, counted(count, "class"))
    if {"rows": width == 6, "columns": rows == 4 + count, "objectness": width == 5 + count}[layout] and count > 0:
        return layout, metadata.names or tuple(map(str, range(count)))
    raise UserError(f"{path}: its output {list(shape)} does not fit {counted(count, 'class')}")
