"""From images to detections in their own pixels: letterbox, model, selection of boxes, and back.

`DetectionSettings` are what detect.py, `load`, a `Predictor` and its calls share."""

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
    """What is detected, and how."""

    imgsz: int = 0  # pixels of the longer side on the canvas; 0: the model's
    # Scores must be above it; None: the threshold with the best F1 in training's last validation, with box voting or
    # without, if the checkpoint stores it, else 0.25.
    conf: float | None = None
    iou: float | None = None  # overlap from which NMS suppresses a box; None: 0.45, no NMS for NMS-free models
    max_det: int = 300  # per image
    classes: Sequence[int | str] | None = None  # keep only these, given by number or name; empty or None: all
    agnostic: bool = False  # boxes of different classes suppress each other too
    box_voting: bool = True  # boxes suppressed by NMS refine the kept box and raise its score

    def changed(self, keywords: Mapping[str, Any]) -> DetectionSettings:
        """With ``keywords``, of which None and an ``imgsz`` of 0 change nothing. Those of other programs may be given
        if they are switched off; raises UserError for other ones."""
        known = [field.name for field in fields(self)]
        for name, value in keywords.items():
            if name not in known and value not in (False, None):
                written = python_hint("argument", name) or "results have save() and show()"
                hint = suggestion(name, known) or f"; {written}"
                raise UserError(f"{name}={value!r}: unknown{hint}")
        changes = {name: value for name, value in keywords.items() if name in known and value is not None}
        changes["imgsz"] = changes.get("imgsz") or self.imgsz
        return replace(self, **changes)

    def fitted(self, model: InferenceModel) -> DetectionSettings:
        """Returns the settings as ``model`` takes them: with an image size, a threshold and classes by number; ``iou``
        None: no NMS. Raises UserError for settings that do not fit."""
        fitted = self._with_checked_values(model)
        if model.votes and not self.box_voting:
            raise UserError(f"{model.path}: box voting is part of the file; export it with --no-box-voting")
        imgsz = _fitted_imgsz(fitted.imgsz, model)
        conf = model.threshold(box_voting=self.box_voting) if self.conf is None else self.conf
        iou = self.iou
        if iou is None:
            iou = DETECTION_IOU if self.agnostic else detection_iou(model.nms_iou)
        return replace(fitted, imgsz=imgsz, conf=conf, iou=iou)

    def _with_checked_values(self, model: InferenceModel) -> DetectionSettings:
        """Returns the settings with whole numbers, and classes by number. Raises UserError for values that no model
        takes, and for classes that ``model`` does not have."""
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
        return replace(self, classes=classes, imgsz=imgsz, max_det=max_det)

    @property
    def postprocess(self) -> PostprocessSettings:
        """How detections are selected with settings that are `fitted`."""
        return PostprocessSettings(
            conf_thres=self.conf,
            iou_thres=self.iou,
            max_det=self.max_det,
            agnostic=self.agnostic,
            multi_label=False,
            classes=self.classes or None,
            box_voting=self.box_voting,
        )


def _fitted_imgsz(imgsz: int, model: InferenceModel) -> int:
    """The longer side of the canvas of ``model``; ``imgsz``: the wanted one, pixels, 0: the model's. Raises UserError
    for one that it does not take."""
    if model.input_hw is None:
        check_image_size(imgsz or model.imgsz, model.stride)
        return imgsz or model.imgsz
    if imgsz not in (0, max(model.input_hw)):
        height, width = model.input_hw
        raise UserError(f"--imgsz {imgsz}: {model.path} takes {height}x{width} pixels (height x width) only")
    return max(model.input_hw)


class Canvases(NamedTuple):
    """Images of one canvas size, letterboxed."""

    rows: list[int]  # of the images of a call
    pixels: Tensor  # uint8 or uint16 (B, h, w, C), pinned for a GPU
    image_hw: list[tuple[int, int]]  # of the images, pixels
    fits: list[Letterbox]
    seconds: float  # that it took


class Pipeline:
    """Maps images to their detections. Several threads may call one pipeline; on a GPU one thread runs the model,
    because cuDNN's plans belong to a thread: each new one would search kernels again (pytorch#191744), and their memory
    is never freed (pytorch#169153).

    ``amp``: autocast type of the model; ``tiles``: how images are cut, None: they are scaled to the canvas.
    """

    def __init__(self, model: InferenceModel, amp: torch.dtype | None, tiles: Tiles | None = None) -> None:
        """Raises UserError for tiles that the model does not take."""
        if tiles:
            tiles.check(model.stride, model.input_hw)
        self.model, self.amp, self.tiles = model, amp, tiles
        self._on_gpu = model.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1) if self._on_gpu else None
        self._has_warned = False

    def __reduce__(self) -> tuple:  # a copy, here or in another process, has a thread of its own
        return Pipeline, (self.model, self.amp, self.tiles)

    def prepare(
        self, images: Sequence[np.ndarray], settings: DetectionSettings, batch_size: int = 0
    ) -> Iterator[Canvases]:
        """Letterboxes images, uint8 (H, W, 3) RGB or of the model's pixels, of any sizes; at most ``batch_size`` of one
        canvas size together (0: 16, but 1 on a CPU). Needs no GPU, so another thread may do it while the model runs.
        ``settings``: as by `DetectionSettings.fitted`."""
        size = self.images_at_once(batch_size)
        rule = self.model.canvases(settings.imgsz)
        by_canvas: dict[tuple[int, int], list[int]] = {}
        for index, image in enumerate(images):
            image_hw = image.shape[:2]
            canvas_hw = image_hw if self.tiles else rule.canvas_hw(image_hw)  # tiles are cut from whole images
            by_canvas.setdefault(canvas_hw, []).append(index)
        dtype = torch.uint8 if self.model.pixels.bits == 8 else torch.uint16
        for canvas_hw, indices in by_canvas.items():
            for start in range(0, len(indices), size):
                started, rows = time.perf_counter(), indices[start : start + size]
                shape = (len(rows), *canvas_hw, self.model.pixels.channels)
                pixels = torch.empty(shape, dtype=dtype, pin_memory=self._on_gpu)
                image_hw = [images[row].shape[:2] for row in rows]
                fits = [fit_letterbox(hw, canvas_hw, None if self.tiles else settings.imgsz) for hw in image_hw]
                for row, fit, canvas in zip(rows, fits, pixels.numpy()):
                    letterbox(images[row], canvas_hw, fit, canvas)
                yield Canvases(rows, pixels, image_hw, fits, time.perf_counter() - started)

    def detect(
        self, prepared: Iterable[Canvases], settings: DetectionSettings
    ) -> tuple[list[DetectionTable], list[dict[str, float]]]:
        """The detections of each image, in the order of the images, and its milliseconds by stage."""
        found: dict[int, tuple[DetectionTable, dict[str, float]]] = {}
        for canvases in prepared:
            started, count = time.perf_counter(), len(canvases.rows)
            compute = partial(self._compute, canvases.pixels, settings)
            detections, copied, computed = self._thread.submit(compute).result() if self._thread else compute()
            places = enumerate(zip(canvases.image_hw, canvases.fits))
            tables = [_table_of(detections, row, *place) for row, place in places]
            seconds = (canvases.seconds + copied - started, computed - copied, time.perf_counter() - computed)
            speed = {name: s * 1e3 / count for name, s in zip(("preprocess", "inference", "postprocess"), seconds)}
            found |= {row: (table, speed) for row, table in zip(canvases.rows, tables)}
        return [found[row][0] for row in sorted(found)], [found[row][1] for row in sorted(found)]

    def images_at_once(self, batch_size: int = 0) -> int:
        """The most images that the model gets at once. ``batch_size``: as in a call."""
        if batch_size < 0:
            raise UserError(f"batch_size: must be at least 0, got {batch_size}")
        if self.tiles:
            return 1  # the tiles of an image are a batch
        return self.model.batch or batch_size or (1 if self.model.device.type == "cpu" else BATCH_SIZE)

    def _compute(self, canvases: Tensor, settings: DetectionSettings) -> tuple[Detections, float, float]:
        """The detections on canvases (B, h, w, C), on the CPU, and when these were on the device and the model was
        done, in seconds."""
        tiled = self._tiled(settings) if self.tiles else None
        with torch.inference_mode():
            # The permuted tensor is in NHWC memory format, as the model is; on a GPU a quarter of the bytes are copied.
            pixels = canvases.to(self.model.device, non_blocking=True).permute(0, 3, 1, 2)
            pixels = pixels / 255 if self.model.pixels.bits == 8 else pixels.float() / 65535
            copied = self._now()
            with torch.autocast(self.model.device.type, self.amp, enabled=self.amp is not None):
                raw = (tiled or self.model)(pixels)
            computed = self._now()
            raw = [level.float() for level in raw]
            found = tiled.stitch(raw)[DETECTED] if tiled else _select(self.model, raw, settings)
            detections = Detections(*(t.cpu() for t in found))
            if not detections.counts.any():
                self._check_outputs(raw)
        return detections, copied, computed

    def _check_outputs(self, raw: list[Tensor]) -> None:
        """Warns once of outputs that are not numbers, in which nothing can be found."""
        if not self._has_warned and bool(torch.stack([level.isnan().any() for level in raw]).any()):
            self._has_warned = True
            get_logger().warning(
                "%s: its outputs are not numbers (NaN), so nothing is found; its weights are damaged, or too large for "
                "half precision: export without --half, or use --amp off",
                self.model.path,
            )

    def _tiled(self, settings: DetectionSettings) -> TiledDetector:
        on_cpu = self.model.device.type == "cpu"
        return TiledDetector(
            self.model,
            lambda model, raw: {DETECTED: _select(model, raw, settings)},
            tiles=self.tiles,
            view_input=ViewInput(
                stride=self.model.stride,
                imgsz=settings.imgsz,
                only_hw=self.model.input_hw,
                batch=IMAGES_IN_CACHE if on_cpu else BATCH_SIZE,
            ),
            selections={DETECTED: settings.postprocess},
        )

    def _now(self) -> float:
        """Seconds; waits until a GPU has done what it was given, so that each stage counts its own work."""
        if self._on_gpu:
            torch.cuda.current_stream(self.model.device).synchronize()
        return time.perf_counter()


def _select(model: InferenceModel, raw: list[Tensor], settings: DetectionSettings) -> Detections:
    """The detections in the model's raw outputs, float32."""
    boxes, scores = model.decode(raw)
    return select_detections(boxes, scores, settings.postprocess)


def _table_of(detections: Detections, row: int, image_hw: tuple[int, int], fit: Letterbox) -> DetectionTable:
    """The detections of one image of a batch, on the CPU, in its original pixels."""
    count = int(detections.counts[row])
    boxes, scores, classes = (t[row, :count].numpy() for t in detections[:3])
    original = letterbox_to_original(boxes.astype(np.float64), fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
    return DetectionTable(
        image_index=np.zeros(count, np.int64),
        boxes_xyxy_px=clip_xyxy(original, image_hw[1], image_hw[0]),
        scores=scores.astype(np.float64),
        classes=classes.copy(),  # a view would keep all slots of the batch
    )
