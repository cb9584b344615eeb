"""Detection in images and in the frames of a source: letterbox, model, selection of boxes, and conversion back to
pixels of the images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from data.render.letterbox import Letterbox, fit_letterbox, letterbox
from engine.inference.model import InferenceModel
from engine.inference.settings import ResolvedSettings
from engine.inference.sources import FileProblem, Frame, FrameStream, ReadAhead
from engine.inference.tracks import ObjectTracks
from models.detector import CPU_CHUNK
from models.postprocess.detections import select_detections
from models.postprocess.tiles import TiledDetector, Tiles, ViewInput
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.detections import Detections, DetectionTable
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.machine.threads import map_ahead

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
        self._thread = model_thread(model.device)
        self._has_warned = False

    def __reduce__(self) -> tuple:  # a copy, here or in another process, has a thread of its own
        return ImageDetector, (self.model, self.amp, self.tiles)

    def images_at_once(self, batch_size: int = 0) -> int:
        """Returns the largest batch for the model: 1 with tiles, which are a batch, else the number that an exported
        file takes, ``batch_size``, or 16 (1 on a CPU)."""
        if self.tiles:
            return 1
        return self.model.batch or batch_size or (1 if self.model.device.type == "cpu" else BATCH_SIZE)

    @property
    def threads(self) -> int:
        """Number of threads for reading and drawing: one on a CPU, whose cores the model uses."""
        return 1 if self.model.device.type == "cpu" else min(available_cores(), MAX_THREADS)

    def prepare(
        self, images: Sequence[np.ndarray], settings: ResolvedSettings, batch_size: int = 0
    ) -> Iterator[Canvases]:
        """Letterboxes images of any sizes, uint8 (H, W, 3) RGB or in the model's pixel format, into batches of one
        canvas size (`images_at_once`). Another thread can do it while the model runs."""
        rule = self.model.canvases(settings.imgsz)
        rows_of_canvas: dict[tuple[int, int], list[int]] = {}
        for row, image in enumerate(images):
            height, width = image.shape[:2]
            canvas_hw = (height, width) if self.tiles else rule.canvas_hw((height, width))
            rows_of_canvas.setdefault(canvas_hw, []).append(row)
        size = self.images_at_once(batch_size)
        for canvas_hw, all_rows in rows_of_canvas.items():
            for start in range(0, len(all_rows), size):
                started = time.perf_counter()
                rows = all_rows[start : start + size]
                shape = (len(rows), *canvas_hw, self.model.pixels.channels)
                pin = self.model.device.type == "cuda"
                pixels = torch.empty(shape, dtype=self.model.pixels.torch_dtype, pin_memory=pin)
                image_hw = [(images[row].shape[0], images[row].shape[1]) for row in rows]
                fits = [fit_letterbox(hw, canvas_hw, None if self.tiles else settings.imgsz) for hw in image_hw]
                for row, fit, canvas in zip(rows, fits, pixels.numpy()):
                    letterbox(images[row], canvas_hw, fit, canvas)
                yield Canvases(rows, pixels, image_hw, fits, time.perf_counter() - started)

    def detect(self, prepared: Iterable[Canvases], settings: ResolvedSettings) -> list[ImageDetections]:
        """Runs detection on letterboxed images. Returns the detections of each image, in the order of the images."""
        detected: dict[int, ImageDetections] = {}
        for canvases in prepared:
            started = time.perf_counter()
            compute = partial(self._compute, canvases.pixels, settings)
            boxes, copied_at, computed_at = self._thread.submit(compute).result() if self._thread else compute()
            tables = [_table_of(*image) for image in zip(boxes, canvases.image_hw, canvases.fits)]
            ms_per_image = 1e3 / len(canvases.rows)
            speed = {
                "preprocess": (canvases.seconds + copied_at - started) * ms_per_image,
                "inference": (computed_at - copied_at) * ms_per_image,
                "postprocess": (time.perf_counter() - computed_at) * ms_per_image,
            }
            detected |= {row: ImageDetections(table, speed) for row, table in zip(canvases.rows, tables)}
        return [detected[row] for row in sorted(detected)]

    def _compute(self, canvases: Tensor, settings: ResolvedSettings) -> tuple[np.ndarray, float, float]:
        """Runs detection on canvases (B, h, w, C). Returns x1, y1, x2, y2, score and class of the detections, float32
        (B, K, 6), with zeros after the last one; and when canvases were copied to the device and the model was done,
        seconds."""
        tiled = self._tiled(settings, self.tiles) if self.tiles else None
        with torch.inference_mode():
            # Permuted, the tensor is in NHWC memory format, like the model; uint8 is a quarter of the bytes to copy.
            pixels = canvases.to(self.model.device, non_blocking=True).permute(0, 3, 1, 2)
            pixels = pixels / 255 if self.model.pixels.bits == 8 else pixels.float() / 65535
            copied_at = self._now()
            with torch.autocast(self.model.device.type, self.amp, enabled=self.amp is not None):
                raw = (tiled or self.model)(pixels)
            computed_at = self._now()
            raw = [level.float() for level in raw]
            found = tiled.stitch(raw)[0] if tiled else _select(self.model, raw, settings)
            columns = (found.boxes_xyxy, found.scores[..., None], found.classes[..., None].float())
            boxes = torch.cat(columns, -1).cpu().numpy()  # one copy from the device
            if not self._has_warned:
                is_empty = not boxes[..., 4].any()
                has_nan = _any_nan(raw) if is_empty else np.isnan(boxes).any()
                self._has_warned = bool(has_nan)
                if self._has_warned:
                    get_logger().warning(
                        "%s: its outputs are not numbers (NaN), so %s; its weights are damaged, or too large for half "
                        "precision: export without --half, or use --amp off",
                        self.model.path,
                        "nothing is found" if is_empty else "some boxes are left out",
                    )
        return boxes, copied_at, computed_at

    def _tiled(self, settings: ResolvedSettings, tiles: Tiles) -> TiledDetector:
        return TiledDetector(
            self.model,
            lambda _, raw: [_select(self.model, raw, settings)],
            tiles=tiles,
            view_input=ViewInput(
                stride=self.model.stride,
                imgsz=settings.imgsz,
                only_hw=self.model.input_hw,
                batch=CPU_CHUNK if self.model.device.type == "cpu" else BATCH_SIZE,
            ),
            settings=[settings.selection],
        )

    def _now(self) -> float:
        """Returns the time in seconds once the GPU has finished, so that each stage counts only its own work."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()
        return time.perf_counter()


def model_thread(device: torch.device) -> ThreadPoolExecutor | None:
    """Starts the thread that runs a model on a GPU, whoever calls it; None for other devices, which need none.

    cuDNN's plans belong to a thread: each new thread would search for kernels again (pytorch#191744), and their memory
    would never be freed (pytorch#169153).
    """
    return ThreadPoolExecutor(1) if device.type == "cuda" else None


def _any_nan(levels: list[Tensor]) -> Tensor:
    return torch.stack([level.isnan().any() for level in levels]).any()


def _select(model: InferenceModel, raw: list[Tensor], settings: ResolvedSettings) -> Detections:
    """Selects the detections in the model's raw outputs, float32."""
    return select_detections(*model.decode(raw), settings.selection)


def _table_of(rows: np.ndarray, image_hw: tuple[int, int], fit: Letterbox) -> DetectionTable:
    """Converts the detections of one image, float32 (K, 6) as `ImageDetector._compute` returns them, to its original
    pixels. Those that are not numbers are left out; a side may be infinite, for boxes are clipped to the image."""
    scores = rows[:, 4]
    rows = rows[(scores > 0) & np.isfinite(scores) & ~np.isnan(rows[:, :4]).any(-1)]
    original = letterbox_to_original(rows[:, :4].astype(np.float64), fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
    return DetectionTable(
        image_index=np.zeros(len(rows), np.int64),
        boxes_xyxy_px=clip_xyxy(original, image_hw[1], image_hw[0]),
        scores=rows[:, 4].astype(np.float64),
        classes=rows[:, 5].astype(np.int64),
    )


@dataclass
class FrameDetections:
    """The detections in a frame."""

    frame: Frame
    table: DetectionTable
    speed: dict[str, float]  # milliseconds by stage
    tracks: np.ndarray | None = None  # int64 (N,), ids of the detections' tracks; None: objects are not tracked


FrameBatch: TypeAlias = list[Frame | FileProblem]


def detect_frames(
    source: FrameStream,
    detector: ImageDetector,
    settings: ResolvedSettings,
    *,
    ahead: ReadAhead,
    tracks: ObjectTracks | None = None,
    skipped: Collection[str] = (),
) -> Generator[FrameDetections | FileProblem, None, None]:
    """Yields the detections in the frames of a source, in order, and the problems of its files at their places. An
    error of the source is raised after the frames before it.

    Args:
        source: frames and problems; it is closed at the end.
        ahead: largest number of frames in a batch. While the model runs, the next batch is read and letterboxed in
            another thread. If it is 0, frames are processed one by one, each before the next one is read.
        tracks: keeps only the detections that belong to tracks, which may be below the threshold of ``settings``;
            None: objects are not tracked.
        skipped: files whose frames are left out from now on; another thread may add to them.

    The generator must be closed by the thread that uses it; that ends its threads and releases the source.
    """
    if tracks is not None:
        lowest = tracks.lowest_confidence
        settings = settings._replace(selection=replace(settings.selection, conf_thres=lowest))

    def batches() -> Iterator[FrameBatch]:
        batch: FrameBatch = []
        count = 0  # frames in the batch
        try:
            for item in source:
                if isinstance(item, Frame):
                    if item.path in skipped:
                        if item.is_live:  # it would never end by itself
                            break
                        continue
                    count += 1
                    ahead.note(item)
                batch.append(item)
                if count >= max(ahead(), 1):
                    yield batch
                    batch = []
                    count = 0
        except Exception:
            if batch:
                yield batch  # before the error is raised
            raise
        if batch:
            yield batch

    def prepare(batch: FrameBatch) -> tuple[FrameBatch, list[Canvases]]:
        images = [item.image for item in batch if isinstance(item, Frame)]
        return batch, list(detector.prepare(images, settings))

    prepared = map_ahead(prepare, batches(), threads=1, ahead=lambda: min(ahead(), 1))
    with contextlib.closing(source), contextlib.closing(prepared):  # the threads end first
        for batch, canvases in prepared:
            detected = iter(detector.detect(canvases, settings))
            for item in batch:
                if isinstance(item, FileProblem):
                    yield item
                    continue
                table, speed = next(detected)
                if tracks is None:
                    yield FrameDetections(item, table, speed)
                else:
                    table, ids = tracks.update(item, table)
                    yield FrameDetections(item, table, speed, ids)
