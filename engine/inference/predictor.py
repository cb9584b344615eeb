"""Detection from Python: a `Predictor` maps images to `Results`.

from engine.inference.predictor import load

model = load("best.pt")
for result in model(["a.jpg", "b.jpg"]):
    print(result.path, result.boxes.xyxy, result.boxes.conf, result.boxes.cls)
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from data.sources import FileProblem, Frame, open_source
from engine.inference.images import Color, InputImage, Source, as_images
from engine.inference.model import InferenceModel, autocast_type
from engine.inference.pipeline import DetectionSettings, Pipeline
from engine.inference.results import Results, boxes_of
from engine.inference.runtimes.open import is_exported, open_model
from models.postprocess.detections import DETECTION_IOU
from models.postprocess.tiles import Tiles
from models.weights.download import fetch_weights
from utils.config.pixels import as_rgb8
from utils.config.settings import check_image_size, class_numbers
from utils.config.yaml_files import suggestion
from utils.distributed.context import DistributedContext
from utils.errors import UserError, one_line
from utils.logger import configure_logging, get_logger
from utils.machine.devices import parse_devices
from utils.machine.resources import available_cores
from utils.machine.threads import Ahead
from utils.structures import DetectionTable

AMP_TYPES = ("auto", "off", "bf16", "fp16")
CONFIDENCE = 0.25  # threshold for a model that does not store one
THREADS = 4  # with a GPU: for reading, and as many for drawing


_METHODS = {  # what to use for a keyword of Ultralytics' models
    "save": "call save() of a result, or use detect.py",
    "save_txt": "call save_txt(FILE) of a result",
    "save_crop": "call save_crop(FOLDER) of a result",
    "show": "call show() of a result",
    "stream": "call model.stream(SOURCE), which yields results one by one",
    "vid_stride": "call model.stream(SOURCE, vid_stride=N)",
    "augment": "val.py --tta evaluates a model with test-time augmentation",
    "half": "give amp='fp16' to load()",
    "agnostic_nms": "write agnostic=True",
    "batch": "write batch_size=N",
    "tracker": "object tracking is not supported",
}


class Keywords(TypedDict, total=False):
    """`DetectionSettings` as arguments; see `load`."""

    imgsz: int
    conf: float | None
    iou: float | None
    max_det: int | None
    classes: Sequence[int | str] | None
    agnostic: bool | None
    box_voting: bool | None


@dataclass
class Detected:
    """What is found in a frame."""

    frame: Frame
    found: DetectionTable | Exception
    speed: dict[str, float]  # milliseconds by stage


class Predictor:
    """Maps images to their detections. Several threads may call one predictor.

    ``conf``, ``iou``, ``max_det``, ``classes``, ``agnostic`` and ``box_voting`` may be set between calls. ``names`` has
    the class names by number.
    """

    task = "detect"

    def __init__(
        self,
        model: InferenceModel,
        *,
        amp: str = "off",
        color: Color | None = None,
        tiles: Tiles | bool = True,
        **settings: Unpack[Keywords],
    ) -> None:
        """See `load` for the arguments. Raises UserError for settings that do not fit the model."""
        settings = _check_keywords(settings)
        self.model, self.device, self.color = model, model.device, color
        self.names = dict(enumerate(model.names))
        given = DetectionSettings(**settings)
        default = CONFIDENCE if model.confidence is None else model.confidence
        self.imgsz, self.conf = self._checked_size(given.imgsz), default if given.conf is None else given.conf
        self.iou, self.max_det, self.classes = given.iou, given.max_det, given.classes
        self.agnostic, self.box_voting = given.agnostic, given.box_voting
        if tiles is True:
            tiles = model.tile > 0 and Tiles(model.tile, full_image=False, scaled=True)
        self.pipeline = Pipeline(model, self._autocast_type(amp), tiles or None)
        self._settings()

    def __call__(
        self,
        source: Source | Sequence[Source],
        *,
        color: Color | None = None,
        batch_size: int = 0,
        verbose: bool = False,
        device: str | int | torch.device | None = None,
        **settings: Unpack[Keywords],
    ) -> list[Results]:
        """A result for each image, in order; a single image gives a list of one.

        Images are processed in batches of one canvas size. A batch gives the detections that its images give one by
        one, up to rounding; batches of 1 give the same bits.

        Args:
            source: an image or a list of them, see `as_images`.
            color: the order of channels in arrays, "bgr" or "rgb"; None: that of `load`.
            batch_size: at most so many images at once; 0: 16, but 1 on a CPU.
            verbose: print a line for each image.
            device: for programs that name the device in each call; it must be the model's.
            settings: imgsz, conf, iou, max_det, classes, agnostic, box_voting for this call; None or imgsz 0: the
                predictor's.

        Raises:
            UserError: an image that cannot be used, or a setting that does not fit.
        """
        if device is not None and parse_devices(str(device)) != (self.device,):
            raise UserError(f"device {device}: the model is on {self.device}; load() puts it on another")
        settings = _check_keywords(settings)
        images = as_images(source, color or self.color, self.model.pixels)
        tables, speeds = self.pipeline([image.image for image in images], self._settings(**settings), batch_size)
        results = [self._result(*parts) for parts in zip(images, tables, speeds)]
        if verbose:
            for result in results:
                print(one_line(f"{result.path}: {result.verbose()}"))
        return results

    def stream(self, source: str | int | Path, *, vid_stride: int = 1) -> Iterator[Results]:
        """A result for each image of ``source``, one after another: an image, folder, glob, video, .txt list of files,
        webcam number or the URL of a stream, as for detect.py.

        Images and videos are read ahead, and processed in batches as in a call; of a live stream, the newest frame is.
        An unreadable file is skipped with a warning if there are several. Raises UserError for an unreadable source.
        """
        if vid_stride < 1:
            raise UserError(f"vid_stride: must be at least 1, got {vid_stride}")
        ahead = Ahead(self.pipeline.images_at_once())
        items = open_source(
            str(source), vid_stride=vid_stride, threads=self.threads, ahead=ahead, pixels=self.model.pixels
        )
        with contextlib.closing(items):
            for item in self.detect_each(items, ahead):
                if isinstance(item, FileProblem):
                    item.log()
                elif isinstance(item, Exception):
                    raise item
                elif isinstance(item.found, Exception):
                    raise item.found
                else:
                    yield self._result(InputImage(item.frame.path, item.frame.image), item.found, item.speed)

    def detect_each(
        self, items: Iterator[Frame | FileProblem], ahead: Ahead
    ) -> Iterator[Detected | FileProblem | Exception]:
        """What is found in each frame of ``items``, between the problems, and last the error that ``items`` raises.

        A batch has at most ``ahead()`` frames, or one, as for live streams. ``ahead`` learns the size of each.
        """
        for batch in _batches(items, ahead):
            detected = iter(self._detect([item for item in batch if isinstance(item, Frame)]))
            yield from (next(detected) if isinstance(item, Frame) else item for item in batch)

    def _detect(self, frames: Sequence[Frame]) -> list[Detected]:
        """If a batch fails, its frames are processed one by one, so that an error is that of one frame."""
        images = [frame.image for frame in frames]
        try:
            tables, speeds = self.pipeline(images, self._settings())
        except Exception as error:
            if len(frames) == 1:
                return [Detected(frames[0], error, {})]
            return [detected for frame in frames for detected in self._detect([frame])]
        return list(map(Detected, frames, tables, speeds))

    def detect(self, images: Sequence[np.ndarray]) -> list[DetectionTable]:
        """The detections in each of ``images``, uint8 (H, W, 3) RGB or of the model's pixels, highest score first, in
        float64."""
        return self.pipeline(images, self._settings())[0]

    @property
    def threads(self) -> int:
        """Threads for reading and drawing: one on a CPU, whose cores the model uses."""
        return 1 if self.device.type == "cpu" else min(available_cores(), THREADS)

    def _result(self, image: InputImage, table: DetectionTable, speed: dict[str, float]) -> Results:
        return Results(as_rgb8(image.image), image.path, self.names, boxes_of(table, image.image.shape[:2]), speed)

    def _checked_size(self, imgsz: int) -> int:
        """``imgsz``, or the model's if 0."""
        try:
            imgsz = operator.index(imgsz)
        except TypeError:
            raise UserError(f"imgsz: must be one whole number, the pixels of the longer side, got {imgsz!r}") from None
        fixed = self.model.input_hw
        if fixed is None:
            check_image_size(imgsz or self.model.imgsz, self.model.stride)
            return imgsz or self.model.imgsz
        if imgsz not in (0, max(fixed)):
            size = f"{fixed[0]}x{fixed[1]}"
            raise UserError(f"--imgsz {imgsz}: {self.model.path} takes {size} pixels (height x width) only")
        return max(fixed)

    def _autocast_type(self, amp: str) -> torch.dtype | None:
        if amp not in AMP_TYPES:
            raise UserError(f"amp: must be one of {', '.join(AMP_TYPES)}, got {amp!r}")
        if self.model.format != "checkpoint" and amp not in ("off", "auto"):
            raise UserError(f"--amp {amp}: {self.model.path} computes in the type it was exported with; use --amp off")
        return autocast_type(self.model, amp)

    def _settings(self, **changes: Unpack[Keywords]) -> DetectionSettings:
        """The predictor's settings with those of ``changes`` that are not None. Raises UserError if one does not
        fit."""
        own = {field.name: getattr(self, field.name) for field in fields(DetectionSettings)}
        given = DetectionSettings(**own | {name: value for name, value in changes.items() if value is not None})
        imgsz = self._checked_size(given.imgsz or self.imgsz)
        max_det, classes, iou = given.max_det, given.classes, given.iou
        try:
            if isinstance(classes, str):
                raise TypeError
            classes = class_numbers(() if classes is None else classes, self.names, "the model")
            max_det = operator.index(max_det)
        except TypeError:
            raise UserError(
                "classes, max_det: must be a list of class numbers or names, and a number, got "
                f"{classes!r} and {max_det!r}"
            ) from None
        for name, value in (("conf", given.conf), ("iou", iou)):
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{name}: must be between 0 and 1, got {value!r}")
        if max_det < 1:
            raise UserError(f"max_det: must be at least 1, got {max_det}")
        if self.model.votes and not given.box_voting:
            raise UserError(f"{self.model.path}: box voting is part of the file; export it with --no-box-voting")
        if iou is None and (given.agnostic or self.model.nms_iou is not None):
            iou = DETECTION_IOU
        return replace(given, imgsz=imgsz, max_det=max_det, classes=classes, iou=iou)


def _check_keywords(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of `Keywords`; those of other programs that are switched off are left out. Raises UserError for
    others."""
    known = {name: value for name, value in settings.items() if name in Keywords.__annotations__}
    for name, value in settings.items():
        if name not in known and value not in (False, None):
            why = _METHODS.get(name) or f"unknown{suggestion(name, Keywords.__annotations__)}"
            raise UserError(f"{name}={value!r}: {why}")
    return known


def _batches(items: Iterator[Frame | FileProblem], ahead: Ahead) -> Iterator[list[Frame | FileProblem | Exception]]:
    """See `Predictor.detect_each`."""
    batch: list[Frame | FileProblem | Exception] = []
    frames = 0
    try:
        for item in items:
            batch.append(item)
            is_live = False
            if isinstance(item, Frame):
                frames, is_live = frames + 1, item.is_live
                ahead.add(item.image.nbytes)
            if is_live or not frames or frames >= ahead():
                yield batch
                batch, frames = [], 0
    except Exception as error:
        batch.append(error)
    yield batch


def load(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "",
    nms: bool = False,
    amp: str = "off",
    color: Color | None = None,
    tiles: Tiles | bool = True,
    trust: bool = False,
    **settings: Unpack[Keywords],
) -> Predictor:
    """Opens a model for detection.

    Args:
        path: a checkpoint, an exported file, or the name of public weights such as yolov8n, which are downloaded.
        device: "cpu", "mps", a GPU's number, or "" for the best available device.
        nms: use the one-to-many head of NMS-free models, with NMS.
        amp: autocast type of the model: "off", "bf16", "fp16", or "auto" for one that the device is fast in.
        color: the order of channels in arrays, "bgr" or "rgb"; None: it is given with each call.
        tiles: cut large images, as ``Tiles(640)``; True: as the model was trained; False: scale them to ``imgsz``.
        trust: as for `open_model`.
        imgsz: pixels of the longer side on the canvas; 0: the model's.
        conf: scores must be above it; None: the threshold with the best F1 in training's last validation if the
            checkpoint stores it, else 0.25.
        iou: a box is suppressed by a better one that it overlaps by more; None: 0.45, no NMS for NMS-free models.
        max_det: maximum number of detections per image.
        classes: keep only these, given by number or name; empty or None: all.
        agnostic: boxes of different classes suppress each other too.
        box_voting: let boxes suppressed by NMS refine the kept box and raise its score.

    Raises:
        UserError: no such file or name, a damaged, unknown or untrusted file, a device that does not exist, or
            settings that do not fit the model.
    """
    model = open_weights(path, device=device, nms=nms, trust=trust)
    return Predictor(model, amp=amp, color=color, tiles=tiles, **settings)


def open_weights(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "",
    nms: bool = False,
    offline: bool = False,
    trust: bool = False,
) -> InferenceModel:
    """The model of a file or of public weights, which are downloaded unless ``offline``. See `load`."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"{path!r}: is not a path; give a checkpoint, an exported file, or the name of public weights")
    if not os.fspath(path):
        raise UserError("an empty path; give a checkpoint, an exported file, or the name of public weights")
    devices = parse_devices(str(device))
    if len(devices) > 1:
        raise UserError(f"--device {device}: detection runs on one device; name one")
    if not Path(path).exists() and not is_exported(path):
        if not get_logger().hasHandlers():
            configure_logging(True)  # a download prints its address and license
        path = fetch_weights(str(path), ctx=DistributedContext.single(), offline=offline)
    return open_model(path, device=devices[0], nms=nms, trust=trust)
