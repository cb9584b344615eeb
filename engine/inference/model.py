"""Models for inference: checkpoints, and files that export.py or another program has exported, are opened, called and
decoded alike.

Legend: B images, N boxes, C classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.render.letterbox import CanvasRule
from engine.export.formats import Session, open_exported
from engine.export.metadata import DEFAULT_HW, ExportMetadata, OutputLayout
from models.detector import Detector
from models.postprocess.selection import DEFAULT_CONFIDENCE
from models.weights.download import fetch_weights
from models.weights.load import load_detector
from utils.address import as_address
from utils.boxes import cxcywh_to_xyxy
from utils.config.export_formats import EXPORT_FORMATS, format_of, titles_of_programs
from utils.config.image_size import check_image_size
from utils.config.settings import AMP_TYPES
from utils.distributed.context import DistributedContext
from utils.errors import UserError, errors_of
from utils.logger import configure_logging, get_logger
from utils.machine.devices import parse_devices, resolve_amp
from utils.machine.limits import explain_limit
from utils.pixels import PixelFormat
from utils.schema import checked_value
from utils.strings import counted


class InferenceModel(nn.Module):
    """A detector for inference. Several threads may call one model."""

    path: Path  # file or folder
    device: torch.device  # device of inputs and outputs
    info: dict[str, Any]  # the checkpoint's content, or the metadata of an exported file
    spec: Mapping[str, Any]  # identity of the model: the detector's spec, or the metadata of an exported file
    names: tuple[str, ...]  # class names
    pixels: PixelFormat
    stride: int  # canvas sides must be multiples of it
    imgsz: int  # longer side of the canvas that the model is meant for, pixels
    input_hw: tuple[int, int] | None  # the only canvas that the model takes, pixels; None: any multiple of ``stride``
    batch: int | None  # number of images that the file takes at once; None: any. `forward` takes any number
    nms_iou: float | None  # IoU threshold of NMS in validation; None if the detections need no NMS
    squares: bool  # images are padded to squares
    confidence: float | None  # threshold chosen by F1 for what detect.py finds; None: unknown
    is_unscored_branch: bool = False  # the one-to-many branch of an NMS-free head (``nms``): training does not score it
    _warned: frozenset[str] = frozenset()  # messages

    def forward(self, images: Tensor) -> list[Tensor]:
        """Computes raw outputs, which `decode` takes, from images float32 (B, C, H, W) in [0, 1], RGB or of other
        `pixels`."""
        raise NotImplementedError

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw outputs to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        raise NotImplementedError

    def stored(self, key: str) -> Any:
        """Returns what training stored as ``key``, in the checkpoint or its settings, or in the details of an exported
        file; None if it stored nothing."""
        places = (self.info, self.info.get("config", {}), self.info.get("details", {}))
        return next((entries[key] for entries in places if entries.get(key) is not None), None)

    @property
    def tile(self) -> int:
        """Side of the tiles on which the model was trained, pixels; 0: whole images."""
        value = self.stored("tile")
        return value if type(value) is int and value > 0 else 0

    @property
    def trained_classes(self) -> list[str]:
        """Names of the classes that ``--classes`` of the training chose; empty: all."""
        names = self.stored("used_classes")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def has_merged_classes(self) -> bool:
        """True if all classes of its data set count as one (``--single-cls`` of the training)."""
        return self.stored("single_cls") is True

    @property
    def has_kept_classes(self) -> bool:
        """True if it has classes of a teacher which its data set may not label (``--keep-old`` of the training)."""
        return self.stored("keep_old") is True

    def canvases(self, imgsz: int, *, rect: bool | None = None) -> CanvasRule:
        """Returns the rule for canvases of images whose longer side is scaled to ``imgsz`` pixels.

        ``rect``: True for rectangles, False for squares; None: as the model's head was trained.
        """
        is_square = self.squares if rect is None else not rect
        return CanvasRule(imgsz, self.stride, is_square, self.input_hw)

    def threshold(self, *, box_voting: bool) -> float:
        """Returns the default confidence threshold of detection: the stored one, which is of detections with box
        voting if they need NMS; else `DEFAULT_CONFIDENCE`."""
        if self.confidence is None or (self.nms_iou is not None and not box_voting):
            return DEFAULT_CONFIDENCE
        return self.confidence

    def warn_of_size(self, imgsz: int) -> None:
        """Warns that ``threshold`` was measured at another size than ``imgsz``, pixels."""
        if self.confidence is not None and imgsz != self.imgsz:
            message = "its confidence threshold was measured at %d pixels; at %d another may be better: set one"
            self._warn_once(message % (self.imgsz, imgsz))

    def warn_of_nan(self, consequence: str) -> None:
        """Warns that the model's outputs are not numbers."""
        self._warn_once(
            f"its outputs are not numbers (NaN), so {consequence}; its weights are damaged, or too large for half "
            "precision: export without --half, or use --amp off"
        )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned |= {message}
            get_logger().warning("%s: %s", self.path, message)


class CheckpointModel(InferenceModel):
    """A detector of a checkpoint, fused, on its device in NHWC memory format."""

    def __init__(self, detector: Detector, info: dict[str, Any], path: Path, device: torch.device) -> None:
        """``detector``: fused, see `Detector.fuse`."""
        super().__init__()
        self.detector = detector.to(device).to(memory_format=torch.channels_last)
        self.path = path
        self.device = device
        self.info = info
        self.spec = detector.spec
        self.names = detector.names
        self.stride = detector.stride
        self.imgsz = info["imgsz"]
        with errors_of(path):
            self.pixels = PixelFormat.checked(detector.channels, info.get("bits", 8), "images")
        self.input_hw = None
        self.batch = None
        self.nms_iou = detector.nms_iou
        self.squares = detector.head.square_letterbox
        self.is_unscored_branch = bool(detector.spec.get("end2end")) and self.nms_iou is not None
        # Training stores the threshold of the branch that it validates.
        confidence = None if self.is_unscored_branch else info.get("progress", {}).get("confidence")
        self.confidence = confidence if isinstance(confidence, float) and 0 <= confidence <= 1 else None

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.detector(images)

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.detector.decode(raw)


class ExportedModel(InferenceModel):
    """A model in an exported file. Batches are padded or cut to the number of images that it takes.

    Runtimes cannot be pickled, so a pickled model stores only the path of its file, which is opened again on
    unpickling.
    """

    def __init__(self, session: Session, metadata: ExportMetadata, path: Path, device: torch.device) -> None:
        """Raises UserError for a file whose input does not fit its metadata."""
        super().__init__()
        self._session = session
        self._metadata = metadata
        self._reopen: Callable[[], InferenceModel] = partial(open_model, path.absolute(), device=device, trust=True)
        self.path = path
        self.device = device
        self.info = self.spec = asdict(metadata)
        self.names = metadata.names
        self.batch, channels, height, width = session.input_shape
        if channels not in (None, metadata.channels):
            raise UserError(
                f"{path}: takes images of {counted(channels, 'channel')}, not {metadata.channels}, as its metadata says"
            )
        self.pixels = PixelFormat(metadata.channels, metadata.bits)
        self.stride = metadata.stride
        stated_height, stated_width = metadata.imgsz_hw or DEFAULT_HW
        shape = (height or stated_height, width or stated_width)
        self.input_hw = shape if height or width else None
        self.imgsz = max(shape)
        self.nms_iou = metadata.nms_iou if metadata.needs_nms else None
        self.squares = metadata.squares
        self.confidence = metadata.confidence

    def __reduce__(self) -> tuple[Callable[[], InferenceModel], tuple[()]]:
        return self._reopen, ()

    def forward(self, images: Tensor) -> list[Tensor]:
        hw = tuple(images.shape[2:])
        if self.input_hw not in (None, hw):
            expected = f"{self.input_hw[0]}x{self.input_hw[1]} pixels (height x width)"
            raise UserError(f"{self.path}: takes inputs of {expected}, not {hw[0]}x{hw[1]}")
        images = images.float()
        size = self.batch or len(images)
        padding = images.new_zeros((-len(images) % size, *images.shape[1:]))
        outputs = [self._run_batch(part) for part in torch.cat((images, padding)).split(size)]
        return [torch.cat(outputs)[: len(images)] if len(outputs) > 1 or len(padding) else outputs[0]]

    def _run_batch(self, images: Tensor) -> Tensor:
        """Runs the file on as many images as it takes. Raises UserError for errors of its runtime, except for limits of
        the machine."""
        try:
            output = self._session.run(images)
        except UserError:
            raise
        except Exception as error:  # each runtime raises types of its own
            if explain_limit(error) is not None:
                raise
            size = f"{images.shape[2]}x{images.shape[3]} pixels"
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{self.path}: cannot process an image of {size} ({reason})") from error
        if output.ndim == 3 and len(output) != len(images):
            raise UserError(f"{self.path}: returns results of {len(output)} for a batch of {len(images)} images")
        return output

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes the output in the layout that the metadata state."""
        output = raw[0].float()
        num_classes = len(self.names)
        with errors_of(self.path):
            layout = self._metadata.output_layout(output.shape)
        if layout is OutputLayout.COLUMNS:
            boxes, scores = output.transpose(1, 2).split((4, num_classes), -1)
            return cxcywh_to_xyxy(boxes), scores.contiguous()
        if layout is OutputLayout.OBJECTNESS:
            boxes, objectness, scores = output.split((4, 1, num_classes), -1)
            return cxcywh_to_xyxy(boxes), objectness * scores
        boxes, scores, classes = output.split((4, 1, 1), -1)
        numbers = classes.round().long()
        unknown = ((numbers < 0) | (numbers >= num_classes)) & (scores > 0)
        if unknown.any():
            number = numbers[unknown][0].item()
            raise UserError(f"{self.path}: predicts class {number}, but its classes are 0 to {num_classes - 1}")
        columns = scores.new_zeros((*scores.shape[:2], num_classes))  # each score in the column of its class
        return boxes, columns.scatter(-1, numbers.clamp(0, num_classes - 1), scores)


def open_model(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "",
    nms: bool = False,
    trust: bool = False,
    offline: bool = False,
    ctx: DistributedContext | None = None,
) -> InferenceModel:
    """Opens a model for inference.

    Args:
        path: a checkpoint (.pt, .pth, .safetensors), a file or folder of one of `EXPORT_FORMATS`, or the name of public
            weights. ``~`` is the user's home.
        device: "cpu", "mps", a GPU's number, or "" for the best available device.
        nms: use the one-to-many branch of an NMS-free head, whose detections need NMS. Exported files have one branch.
        trust: open files of formats whose files may run code.
        offline: do not download public weights.
        ctx: the processes that call this; None: one.

    Raises UserError for a missing, damaged, unfit or untrusted file, a package that is not installed, a device that
    does not exist, and ``nms`` for an exported file that needs none.
    """
    nms = bool(checked_value("nms", nms, bool | None))
    trust = bool(checked_value("trust", trust, bool | None))  # "no" must not trust a file
    devices = parse_devices(str(device))
    if len(devices) > 1:
        raise UserError(f"--device {device}: detection runs on one device; name one")
    name_or_path = os.path.expanduser(as_address(os.fspath(path)))
    name = format_of(name_or_path)
    if name is None:
        if not os.path.exists(name_or_path) and not get_logger().hasHandlers():
            configure_logging(True)  # a download prints its address and license
        path = fetch_weights(name_or_path, ctx=ctx or DistributedContext.single(), offline=offline)
        detector, info = load_detector(path)
        return CheckpointModel(detector.fuse(one_to_one=not nms), info, path, devices[0])
    path = Path(name_or_path)
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: no such file")
    if EXPORT_FORMATS[name].runs_code and not trust:
        raise UserError(
            f"{path}: opening {titles_of_programs()} files may run code in them; if you trust its source, use "
            "--trust (in Python: trust=True)"
        )
    metadata, session = open_exported(path, devices[0])
    if nms and not metadata.needs_nms:
        raise UserError(
            f"{path}: --nms: its detections need no NMS; leave it out or, if the checkpoint has two branches, export "
            "the other one with export.py --nms"
        )
    return ExportedModel(session, metadata, path, devices[0])


def autocast_type(model: InferenceModel, amp: str) -> torch.dtype | None:
    """Returns the autocast type of ``model`` for ``--amp``; None: no autocast.

    float16 on a CPU is replaced by float32 with a warning. Raises UserError for an unknown type, and for "bf16" or
    "fp16" with an exported file.
    """
    if amp not in AMP_TYPES:
        raise UserError(f"amp: must be one of {', '.join(AMP_TYPES)}, got {amp!r}")
    if not isinstance(model, CheckpointModel):
        if amp in ("bf16", "fp16"):
            raise UserError(f"--amp {amp}: {model.path} computes in the type it was exported with; leave it out")
        return None
    if amp == "fp16" and model.device.type == "cpu":
        get_logger().warning("float16 (--half, --amp fp16) is not supported on CPUs; computing in float32")
        return None
    return resolve_amp(amp, model.device)


def resolve_imgsz(imgsz: int, model: InferenceModel) -> int:
    """Returns the longer side of the scaled image, pixels. ``imgsz``: the wanted one, or 0 for the model's. Raises
    UserError for a size that the model does not take."""
    if model.input_hw is None:
        check_image_size(imgsz or model.imgsz, model.stride)
        return imgsz or model.imgsz
    if imgsz not in (0, max(model.input_hw)):
        height, width = model.input_hw
        raise UserError(
            f"--imgsz {imgsz}: {model.path} takes {height}x{width} pixels (height x width) only; leave --imgsz out"
        )
    return max(model.input_hw)
