"""Detection in images: letterbox, model, selection of boxes, and conversion back to pixels of the images."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.render.letterbox import Letterbox, fit_letterbox, letterbox
from engine.inference.model import InferenceModel
from engine.inference.settings import ResolvedSettings
from models.detector import CPU_CHUNK
from models.postprocess.detections import select_detections
from models.postprocess.tiles import TiledDetector, Tiles, ViewInput
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.detections import Detections, DetectionTable, to_host
from utils.logger import get_logger
from utils.machine.resources import available_cores

BATCH_SIZE = 16  # on GPUs
MAX_THREADS = 4  # with a GPU, for reading and for drawing each


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


class ImageDetector:
    """Maps images to their detections. Several threads may call one detector.

    ``amp``: autocast type of the model. ``tiles``: how to cut images; None: scale them to the canvas.
    """

    def __init__(self, model: InferenceModel, amp: torch.dtype | None, tiles: Tiles | None = None) -> None:
        """Raises UserError for tiles that the model cannot take."""
        if tiles:
            tiles.check(model.stride, model.input_hw)
        self.model = model
        self.amp = amp
        self.tiles = tiles
        self._on_gpu = model.device.type == "cuda"
        self._thread = model_thread(model.device)
        self._has_warned = False

    def __reduce__(self) -> tuple:  # a copy, here or in another process, has a thread of its own
        return ImageDetector, (self.model, self.amp, self.tiles)

    def prepare(
        self, images: Sequence[np.ndarray], settings: ResolvedSettings, batch_size: int = 0
    ) -> Iterator[Canvases]:
        """Letterboxes images of any sizes, uint8 (H, W, 3) RGB or in the model's pixel format.

        Each batch holds images of one canvas size: as many as an exported file takes at once, if it has a fixed number,
        else at most ``batch_size`` (0: 16, but 1 on a CPU); with tiles, one. This needs no GPU, so another thread can
        do it while the model runs.
        """
        size = self.images_at_once(batch_size)
        for canvas_hw, rows in self._rows_by_canvas(images, settings).items():
            for start in range(0, len(rows), size):
                yield self._letterboxed(images, rows[start : start + size], canvas_hw, settings)

    def _rows_by_canvas(
        self, images: Sequence[np.ndarray], settings: ResolvedSettings
    ) -> dict[tuple[int, int], list[int]]:
        """Groups the numbers of images by the height and width of their canvas."""
        rule = self.model.canvases(settings.imgsz)
        by_canvas: dict[tuple[int, int], list[int]] = {}
        for row, image in enumerate(images):
            height, width = image.shape[:2]
            canvas_hw = (height, width)  # tiles are cut from whole images
            if not self.tiles:
                canvas_hw = rule.canvas_hw(canvas_hw)
            by_canvas.setdefault(canvas_hw, []).append(row)
        return by_canvas

    def _letterboxed(
        self, images: Sequence[np.ndarray], rows: list[int], canvas_hw: tuple[int, int], settings: ResolvedSettings
    ) -> Canvases:
        """Letterboxes the images ``rows``."""
        started = time.perf_counter()
        dtype = torch.uint8 if self.model.pixels.bits == 8 else torch.uint16
        shape = (len(rows), *canvas_hw, self.model.pixels.channels)
        pixels = torch.empty(shape, dtype=dtype, pin_memory=self._on_gpu)
        image_hw = [(images[row].shape[0], images[row].shape[1]) for row in rows]
        fits = [fit_letterbox(hw, canvas_hw, None if self.tiles else settings.imgsz) for hw in image_hw]
        for row, fit, canvas in zip(rows, fits, pixels.numpy()):
            letterbox(images[row], canvas_hw, fit, canvas)
        return Canvases(rows, pixels, image_hw, fits, time.perf_counter() - started)

    def detect(self, prepared: Iterable[Canvases], settings: ResolvedSettings) -> list[ImageDetections]:
        """Runs detection on letterboxed images. Returns the detections of each image, in the order of the images."""
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
        if self.tiles:
            return 1  # the tiles of an image are a batch
        default = 1 if self.model.device.type == "cpu" else BATCH_SIZE
        return self.model.batch or batch_size or default

    @property
    def threads(self) -> int:
        """Number of threads for reading and drawing: one on a CPU, whose cores the model uses."""
        return 1 if self.model.device.type == "cpu" else min(available_cores(), MAX_THREADS)

    def _compute(self, canvases: Tensor, settings: ResolvedSettings) -> _Output:
        """Runs detection on canvases (B, h, w, C)."""
        tiled = self._tiled(settings, self.tiles) if self.tiles else None
        with torch.inference_mode():
            # The permuted tensor is in NHWC memory format, like the model. uint8 is a quarter of the bytes to copy to a
            # GPU.
            pixels = canvases.to(self.model.device, non_blocking=True).permute(0, 3, 1, 2)
            pixels = pixels / 255 if self.model.pixels.bits == 8 else pixels.float() / 65535
            copied_at = self._now()
            with torch.autocast(self.model.device.type, self.amp, enabled=self.amp is not None):
                raw = (tiled or self.model)(pixels)
            computed_at = self._now()
            raw = [level.float() for level in raw]
            detections = tiled.stitch(raw)[0] if tiled else _select(self.model, raw, settings)
            (detections,) = to_host(detections)
            self._warn_of_outputs(raw, detections)
        return _Output(detections, copied_at, computed_at)

    def _warn_of_outputs(self, raw: list[Tensor], detections: Detections) -> None:
        """Warns once if outputs are not numbers, so that nothing is found, or boxes are left out."""
        if self._has_warned:
            return
        if not detections.counts.any():
            is_damaged = bool(torch.stack([level.isnan().any() for level in raw]).any())
            effect = "nothing is found"
        else:
            is_damaged = not _are_numbers(detections.boxes_xyxy.numpy(), detections.scores.numpy()).all()
            effect = "some boxes are left out"
        if is_damaged:
            self._has_warned = True
            get_logger().warning(
                "%s: its outputs are not numbers (NaN), so %s; its weights are damaged, or too large for half "
                "precision: export without --half, or use --amp off",
                self.model.path,
                effect,
            )

    def _tiled(self, settings: ResolvedSettings, tiles: Tiles) -> TiledDetector:
        on_cpu = self.model.device.type == "cpu"
        return TiledDetector(
            self.model,
            lambda _, raw: [_select(self.model, raw, settings)],
            tiles=tiles,
            view_input=ViewInput(
                stride=self.model.stride,
                imgsz=settings.imgsz,
                only_hw=self.model.input_hw,
                batch=CPU_CHUNK if on_cpu else BATCH_SIZE,
            ),
            settings=[settings.postprocess],
        )

    def _now(self) -> float:
        """Returns the time in seconds once the GPU has finished, so that each stage counts only its own work."""
        if self._on_gpu:
            torch.cuda.current_stream(self.model.device).synchronize()
        return time.perf_counter()


def model_thread(device: torch.device) -> ThreadPoolExecutor | None:
    """Starts the thread that runs a model on a GPU, whoever calls it; None for other devices, which need none.

    cuDNN's plans belong to a thread: each new thread would search for kernels again (pytorch#191744), and their memory
    would never be freed (pytorch#169153).
    """
    return ThreadPoolExecutor(1) if device.type == "cuda" else None


def _select(model: InferenceModel, raw: list[Tensor], settings: ResolvedSettings) -> Detections:
    """Selects the detections in the model's raw outputs, float32."""
    boxes, scores = model.decode(raw)
    return select_detections(boxes, scores, settings.postprocess)


def _table_of(detections: Detections, row: int, image_hw: tuple[int, int], fit: Letterbox) -> DetectionTable:
    """Converts the detections of one image of a batch, on the CPU, to its original pixels. Those that are not numbers
    are left out."""
    count = int(detections.counts[row])
    boxes = detections.boxes_xyxy[row, :count].numpy()
    scores = detections.scores[row, :count].numpy()
    classes = detections.classes[row, :count].numpy()
    original = letterbox_to_original(boxes.astype(np.float64), fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
    table = DetectionTable(
        image_index=np.zeros(count, np.int64),
        boxes_xyxy_px=clip_xyxy(original, image_hw[1], image_hw[0]),
        scores=scores.astype(np.float64),
        classes=classes,
    )
    return table.take(_are_numbers(boxes, scores))  # copies: a view would keep all slots of the batch


def _are_numbers(boxes_xyxy: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Returns which detections, boxes (..., 4) and scores (...), can be shown: bool (...). A side may be infinite, for
    boxes are clipped to the image."""
    return ~np.isnan(boxes_xyxy).any(-1) & np.isfinite(scores)
