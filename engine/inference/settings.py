"""Detection in images: letterbox, model, selection of boxes, and conversion back to pixels of the images.

detect.py, `load`, a `Predictor` and its calls share `DetectionSettings`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.render.letterbox import Letterbox, fit_letterbox, letterbox
from engine.inference.model import InferenceModel
from models.detector import IMAGES_IN_CACHE
from models.postprocess.detections import DETECTED, DETECTION_IOU, PostprocessSettings, detection_iou, select_detections
from models.postprocess.tiles import Tiles
from models.postprocess.tiling import TiledDetector, ViewInput
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.config.other_programs import python_hint
from utils.config.parser import check_image_size, class_numbers
from utils.errors import UserError
from utils.files.schema import suggestion
from utils.logger import get_logger
from utils.structures import Detections, DetectionTable

BATCH_SIZE = 16  # on GPUs


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """Settings of detection that a user chooses."""

    imgsz: int = 0  # longer side of the canvas, pixels; 0: the model's
    # Confidence threshold. None: the one with the best F1 in training's last validation, with box voting or without, if
    # the checkpoint stores it, else 0.25.
    conf: float | None = None
    iou: float | None = None  # IoU threshold of NMS; None: 0.45, no NMS for NMS-free models
    max_det: int = 300  # per image
    classes: Sequence[int | str] | None = None  # return only these, by number or name; empty or None: all
    agnostic: bool = False  # boxes of different classes suppress each other too
    box_voting: bool = True  # boxes suppressed by NMS refine the kept box and raise its score

    def changed(self, keywords: Mapping[str, Any]) -> DetectionSettings:
        """Returns the settings with ``keywords``, of which None and an ``imgsz`` of 0 change nothing. Keywords of other
        programs are accepted if they are switched off. Raises UserError for unknown ones."""
        known = [field.name for field in fields(self)]
        for name, value in keywords.items():
            if name not in known and value not in (False, None):
                hint = python_hint("argument", name) or f"the settings are {', '.join(known)}"
                raise UserError(f"{name}={value!r}: unknown{suggestion(name, known) or f'; {hint}'}")
        changes = {name: value for name, value in keywords.items() if name in known and value is not None}
        changes["imgsz"] = changes.get("imgsz") or self.imgsz
        return replace(self, **changes)

    def resolve(self, model: InferenceModel) -> ResolvedSettings:
        """Fills in the defaults of ``model``. Raises UserError for values that no model takes, or this one does not."""
        classes, imgsz, max_det = self._checked_numbers(model)
        if model.votes and not self.box_voting:
            raise UserError(f"{model.path}: box voting is part of the file; export it with --no-box-voting")
        iou = self.iou
        if iou is None:
            iou = DETECTION_IOU if self.agnostic else detection_iou(model.nms_iou)
        return ResolvedSettings(
            imgsz=_resolve_imgsz(imgsz, model),
            conf=model.threshold(box_voting=self.box_voting) if self.conf is None else self.conf,
            iou=iou,
            max_det=max_det,
            classes=classes,
            agnostic=self.agnostic,
            box_voting=self.box_voting,
        )

    def _checked_numbers(self, model: InferenceModel) -> tuple[Sequence[int], int, int]:
        """Returns ``classes`` by number, ``imgsz`` and ``max_det``. Raises UserError for values that no model takes,
        and for classes that ``model`` does not have."""
        try:
            if isinstance(self.classes, str):
                raise TypeError
            classes = () if self.classes is None else self.classes
            classes = class_numbers(classes, dict(enumerate(model.names)), "the model")
            imgsz = operator.index(self.imgsz)
            max_det = operator.index(self.max_det)
        except TypeError:
            raise UserError(
                "classes, imgsz, max_det: must be a list of class numbers or names, and whole numbers, got "
                f"{self.classes!r}, {self.imgsz!r} and {self.max_det!r}"
            ) from None
        for name, value in (("conf", self.conf), ("iou", self.iou)):
            if value is not None and not (isinstance(value, int | float | np.number) and 0 <= value <= 1):
                raise UserError(f"{name}: must be between 0 and 1, got {value!r}")
        if max_det < 1:
            raise UserError(f"max_det: must be at least 1, got {max_det}")
        return classes, imgsz, max_det


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings:
    """`DetectionSettings` with the defaults of a model."""

    imgsz: int
    conf: float
    iou: float | None  # None: no NMS
    max_det: int
    classes: Sequence[int]  # empty: all
    agnostic: bool
    box_voting: bool

    @property
    def postprocess(self) -> PostprocessSettings:
        """Settings with which detections are selected."""
        return PostprocessSettings(
            conf_thres=self.conf,
            iou_thres=self.iou,
            max_det=self.max_det,
            agnostic=self.agnostic,
            multi_label=False,
            classes=self.classes or None,
            box_voting=self.box_voting,
        )


def _resolve_imgsz(imgsz: int, model: InferenceModel) -> int:
    """Returns the longer side of the canvas, pixels. ``imgsz``: the wanted one, or 0 for the model's. Raises UserError
    for a size that the model does not take."""
    if model.input_hw is None:
        check_image_size(imgsz or model.imgsz, model.stride)
        return imgsz or model.imgsz
    if imgsz not in (0, max(model.input_hw)):
        height, width = model.input_hw
        raise UserError(f"--imgsz {imgsz}: {model.path} takes {height}x{width} pixels (height x width) only")
    return max(model.input_hw)


class Canvases(NamedTuple):
    """Images of one canvas size, letterboxed."""

    rows: list[int]  # numbers of the images in a call
    pixels: Tensor  # uint8 or uint16 (B, h, w, C), pinned for a GPU
    image_hw: list[tuple[int, int]]  # sizes of the images, pixels
    fits: list[Letterbox]
    seconds: float  # duration of the letterboxing


class ImageDetections(NamedTuple):
    """The detections of an image, in its pixels."""

    table: DetectionTable
    speed: dict[str, float]  # milliseconds by stage


class _Output(NamedTuple):
    """Detections on canvases, on the CPU, and the times at which stages were done, seconds."""

    detections: Detections
    copied_at: float  # canvases were on the device
    computed_at: float  # the model was done


class Pipeline:
    """Maps images to their detections. Several threads may call one pipeline; on a GPU one thread runs the model,
    because cuDNN's plans belong to a thread: each new one would search kernels again (pytorch#191744), and their memory
    is never freed (pytorch#169153).

    ``amp``: autocast type of the model. ``tiles``: how to cut images; None: scale them to the canvas.
    """

    def __init__(self, model: InferenceModel, amp: torch.dtype | None, tiles: Tiles | None = None) -> None:
        """Raises UserError for tiles that the model does not take."""
        if tiles:
            tiles.check(model.stride, model.input_hw)
        self.model = model
        self.amp = amp
        self.tiles = tiles
        self._on_gpu = model.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1) if self._on_gpu else None
        self._has_warned = False

    def __reduce__(self) -> tuple:  # a copy, here or in another process, has a thread of its own
        return Pipeline, (self.model, self.amp, self.tiles)

    def prepare(
        self, images: Sequence[np.ndarray], settings: ResolvedSettings, batch_size: int = 0
    ) -> Iterator[Canvases]:
        """Letterboxes images of any sizes, uint8 (H, W, 3) RGB or in the model's pixel format.

        At most ``batch_size`` of one canvas size are put together (0: 16, but 1 on a CPU). It needs no GPU, so another
        thread may do it while the model runs.
        """
        size = self.images_at_once(batch_size)
        rule = self.model.canvases(settings.imgsz)
        by_canvas: dict[tuple[int, int], list[int]] = {}
        for index, image in enumerate(images):
            height, width = image.shape[:2]
            canvas_hw = (height, width)  # tiles are cut from whole images
            if not self.tiles:
                canvas_hw = rule.canvas_hw(canvas_hw)
            by_canvas.setdefault(canvas_hw, []).append(index)
        dtype = torch.uint8 if self.model.pixels.bits == 8 else torch.uint16
        for canvas_hw, indices in by_canvas.items():
            for start in range(0, len(indices), size):
                started = time.perf_counter()
                rows = indices[start : start + size]
                shape = (len(rows), *canvas_hw, self.model.pixels.channels)
                pixels = torch.empty(shape, dtype=dtype, pin_memory=self._on_gpu)
                image_hw = [(images[row].shape[0], images[row].shape[1]) for row in rows]
                fits = [fit_letterbox(hw, canvas_hw, None if self.tiles else settings.imgsz) for hw in image_hw]
                for row, fit, canvas in zip(rows, fits, pixels.numpy()):
                    letterbox(images[row], canvas_hw, fit, canvas)
                yield Canvases(rows, pixels, image_hw, fits, time.perf_counter() - started)

    def detect(self, prepared: Iterable[Canvases], settings: ResolvedSettings) -> list[ImageDetections]:
        """Detects in letterboxed images. Returns the detections of each image, in the order of the images."""
        detected: dict[int, ImageDetections] = {}
        for canvases in prepared:
            started = time.perf_counter()
            compute = partial(self._compute, canvases.pixels, settings)
            output = self._thread.submit(compute).result() if self._thread else compute()
            tables = [
                _table_of(output.detections, number, image_hw, fit)
                for number, (image_hw, fit) in enumerate(zip(canvases.image_hw, canvases.fits))
            ]
            ms_per_image = 1e3 / len(canvases.rows)
            speed = {
                "preprocess": (canvases.seconds + output.copied_at - started) * ms_per_image,
                "inference": (output.computed_at - output.copied_at) * ms_per_image,
                "postprocess": (time.perf_counter() - output.computed_at) * ms_per_image,
            }
            for row, table in zip(canvases.rows, tables):
                detected[row] = ImageDetections(table, speed)
        return [detected[row] for row in sorted(detected)]

    def images_at_once(self, batch_size: int = 0) -> int:
        """Returns the largest batch for the model. ``batch_size``: see `prepare`."""
        if batch_size < 0:
            raise UserError(f"batch_size: must be at least 0, got {batch_size}")
        if self.tiles:
            return 1  # the tiles of an image are a batch
        default = 1 if self.model.device.type == "cpu" else BATCH_SIZE
        return self.model.batch or batch_size or default

    def _compute(self, canvases: Tensor, settings: ResolvedSettings) -> _Output:
        """Detects on canvases (B, h, w, C)."""
        tiled = self._tiled(settings, self.tiles) if self.tiles else None
        with torch.inference_mode():
            # The permuted tensor is in NHWC memory format, as the model is; on a GPU a quarter of the bytes are copied.
            pixels = canvases.to(self.model.device, non_blocking=True).permute(0, 3, 1, 2)
            pixels = pixels / 255 if self.model.pixels.bits == 8 else pixels.float() / 65535
            copied_at = self._now()
            with torch.autocast(self.model.device.type, self.amp, enabled=self.amp is not None):
                raw = (tiled or self.model)(pixels)
            computed_at = self._now()
            raw = [level.float() for level in raw]
            detections = tiled.stitch(raw)[DETECTED] if tiled else _select(self.model, raw, settings)
            detections = Detections(*(t.cpu() for t in detections))
            if not detections.counts.any():
                self._check_outputs(raw)
        return _Output(detections, copied_at, computed_at)

    def _check_outputs(self, raw: list[Tensor]) -> None:
        """Warns once if outputs are not numbers, so that nothing can be detected."""
        if not self._has_warned and bool(torch.stack([level.isnan().any() for level in raw]).any()):
            self._has_warned = True
            get_logger().warning(
                "%s: its outputs are not numbers (NaN), so nothing is found; its weights are damaged, or too large for "
                "half precision: export without --half, or use --amp off",
                self.model.path,
            )

    def _tiled(self, settings: ResolvedSettings, tiles: Tiles) -> TiledDetector:
        on_cpu = self.model.device.type == "cpu"
        return TiledDetector(
            self.model,
            lambda _, raw: {DETECTED: _select(self.model, raw, settings)},
            tiles=tiles,
            view_input=ViewInput(
                stride=self.model.stride,
                imgsz=settings.imgsz,
                only_hw=self.model.input_hw,
                batch=IMAGES_IN_CACHE if on_cpu else BATCH_SIZE,
            ),
            selections={DETECTED: settings.postprocess},
        )

    def _now(self) -> float:
        """Returns the time in seconds, after the GPU's queue is empty, so that each stage counts its own work."""
        if self._on_gpu:
            torch.cuda.current_stream(self.model.device).synchronize()
        return time.perf_counter()


def _select(model: InferenceModel, raw: list[Tensor], settings: ResolvedSettings) -> Detections:
    """Selects the detections in the model's raw outputs, float32."""
    boxes, scores = model.decode(raw)
    return select_detections(boxes, scores, settings.postprocess)


def _table_of(detections: Detections, row: int, image_hw: tuple[int, int], fit: Letterbox) -> DetectionTable:
    """Converts the detections of one image of a batch, on the CPU, to its original pixels."""
    count = int(detections.counts[row])
    boxes = detections.boxes_xyxy[row, :count].numpy()
    scores = detections.scores[row, :count].numpy()
    classes = detections.classes[row, :count].numpy()
    original = letterbox_to_original(boxes.astype(np.float64), fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
    return DetectionTable(
        image_index=np.zeros(count, np.int64),
        boxes_xyxy_px=clip_xyxy(original, image_hw[1], image_hw[0]),
        scores=scores.astype(np.float64),
        classes=classes.copy(),  # a view would keep all slots of the batch
    )
