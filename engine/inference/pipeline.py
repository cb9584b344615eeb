"""From images to detections in their own pixels: letterbox, model, selection of boxes, and back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data.render.letterbox import Letterbox, fit_letterbox, letterbox
from engine.inference.model import InferenceModel
from models.detector import IMAGES_IN_CACHE
from models.postprocess.detections import select_detections
from models.postprocess.tiles import Tiles
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.errors import UserError
from utils.logger import get_logger
from utils.structures import Detections, DetectionTable

if TYPE_CHECKING:
    from models.postprocess.tiling import TiledDetector

BATCH_SIZE = 16  # on GPUs


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """Which boxes are detections; see `engine.inference.predictor.load`."""

    imgsz: int = 0
    conf: float | None = None
    iou: float | None = None
    max_det: int = 300
    classes: Sequence[int | str] | None = ()
    agnostic: bool = False
    box_voting: bool = True


class Pipeline:
    """Maps images to their detections. Several threads may call one pipeline; on a GPU one thread runs the model,
    because cuDNN's plans belong to a thread: each new one would search kernels again (pytorch#191744), and their memory
    is never freed (pytorch#169153).

    Args:
        model: on its device.
        amp: autocast type of the model; None: none.
        tiles: how images are cut; None: they are scaled to the canvas.
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

    def __call__(
        self, images: Sequence[np.ndarray], settings: DetectionSettings, batch_size: int = 0
    ) -> tuple[list[DetectionTable], list[dict[str, float]]]:
        """The detections of each image, uint8 (H, W, 3) RGB or of the model's pixels, and its milliseconds by stage.

        Args:
            images: of any sizes; those whose canvases have one size are processed together.
            settings: that the model takes: with an image size, a threshold and classes by number. ``iou`` None: no NMS.
            batch_size: at most so many images at once; 0: 16, but 1 on a CPU.
        """
        size = self.images_at_once(batch_size)
        by_canvas: dict[tuple[int, int], list[int]] = {}
        for index, image in enumerate(images):
            by_canvas.setdefault(self.canvas_hw(image.shape[:2], settings.imgsz), []).append(index)
        tables: dict[int, DetectionTable] = {}
        speeds: dict[int, dict[str, float]] = {}
        for canvas_hw, indices in by_canvas.items():
            for start in range(0, len(indices), size):
                batch = indices[start : start + size]
                found, speed = self._process([images[i] for i in batch], canvas_hw, settings)
                tables.update(zip(batch, found))
                speeds.update(dict.fromkeys(batch, speed))
        return [tables[i] for i in range(len(images))], [speeds[i] for i in range(len(images))]

    def images_at_once(self, batch_size: int = 0) -> int:
        """The most images that the model gets at once. ``batch_size``: as in a call."""
        if batch_size < 0:
            raise UserError(f"batch_size: must be at least 0, got {batch_size}")
        if self.tiles:
            return 1  # the tiles of an image are a batch
        return self.model.batch or batch_size or (1 if self.model.device.type == "cpu" else BATCH_SIZE)

    def _process(
        self, images: Sequence[np.ndarray], canvas_hw: tuple[int, int], settings: DetectionSettings
    ) -> tuple[list[DetectionTable], dict[str, float]]:
        started = time.perf_counter()
        tiled = self._tiled(settings) if self.tiles else None
        kind = self.model.pixels
        shape = (len(images), *canvas_hw, kind.channels)
        canvases = torch.empty(shape, dtype=torch.uint8 if kind.bits == 8 else torch.uint16, pin_memory=self._on_gpu)
        fits = [fit_letterbox(image.shape[:2], canvas_hw, None if tiled else settings.imgsz) for image in images]
        for image, fit, canvas in zip(images, fits, canvases.numpy()):
            letterbox(image, canvas_hw, fit, canvas)
        compute = partial(self._compute, canvases, settings, tiled)
        detections, prepared, computed = self._thread.submit(compute).result() if self._thread else compute()
        tables = [
            _table_of(detections, row, image.shape[:2], fit) for row, (image, fit) in enumerate(zip(images, fits))
        ]
        times = (started, prepared, computed, time.perf_counter())
        stages = zip(("preprocess", "inference", "postprocess"), times, times[1:])
        return tables, {name: (end - start) * 1e3 / len(images) for name, start, end in stages}

    def _compute(
        self, canvases: Tensor, settings: DetectionSettings, tiled: TiledDetector | None
    ) -> tuple[Detections, float, float]:
        """The detections on canvases (B, h, w, C), on the CPU, and when these were on the device and the model was
        done, in seconds."""
        with torch.inference_mode():
            # The permuted tensor is in NHWC memory format, as the model is; on a GPU a quarter of the bytes are copied.
            pixels = canvases.to(self.model.device, non_blocking=True).permute(0, 3, 1, 2)
            pixels = pixels / 255 if self.model.pixels.bits == 8 else pixels.float() / 65535
            prepared = self._now()
            with torch.autocast(self.model.device.type, self.amp, enabled=self.amp is not None):
                raw = (tiled or self.model)(pixels)
            computed = self._now()
            raw = [level.float() for level in raw]
            found = tiled.stitch(raw) if tiled else _select(self.model, raw, settings)
            detections = Detections(*(t.cpu() for t in found))
            if not detections.counts.any():
                self._check_outputs(raw)
        return detections, prepared, computed

    def _check_outputs(self, raw: list[Tensor]) -> None:
        """Warns once of outputs that are not numbers, in which nothing can be found."""
        if not self._has_warned and any(bool(level.isnan().any()) for level in raw):
            self._has_warned = True
            get_logger().warning(
                "%s: its outputs are not numbers (NaN), so nothing is found; its weights are damaged, or too large for "
                "half precision: export without --half, or use --amp off",
                self.model.path,
            )

    def _tiled(self, settings: DetectionSettings) -> TiledDetector:
        from models.postprocess.tiling import TiledDetector

        on_cpu = self.model.device.type == "cpu"
        return TiledDetector(
            self.model,
            partial(_select, settings=settings),
            tiles=self.tiles,
            stride=self.model.stride,
            imgsz=settings.imgsz,
            input_hw=self.model.input_hw,
            batch=IMAGES_IN_CACHE if on_cpu else BATCH_SIZE,
            iou_thres=settings.iou,
            max_det=settings.max_det,
            agnostic=settings.agnostic,
        )

    def _now(self) -> float:
        """Seconds; waits until a GPU has done what it was given, so that each stage counts its own work."""
        if self._on_gpu:
            torch.cuda.current_stream(self.model.device).synchronize()
        return time.perf_counter()

    def canvas_hw(self, image_hw: tuple[int, int], imgsz: int) -> tuple[int, int]:
        """The model's canvas, or the smallest one of whole strides that holds the image with its longer side at
        ``imgsz``. With tiles, the image's own size."""
        if self.tiles:
            return image_hw
        if self.model.input_hw:
            return self.model.input_hw
        height, width = (-(-side * imgsz // max(image_hw)) for side in image_hw)
        stride = self.model.stride
        return -(-height // stride) * stride, -(-width // stride) * stride


def _select(model: InferenceModel, raw: list[Tensor], settings: DetectionSettings) -> Detections:
    """The detections in the model's raw outputs, float32."""
    boxes, scores = model.decode(raw)
    return select_detections(
        boxes,
        scores,
        conf_thres=settings.conf,
        iou_thres=settings.iou,
        max_det=settings.max_det,
        agnostic=settings.agnostic,
        multi_label=False,
        classes=settings.classes or None,
        box_voting=settings.box_voting,
    )


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
