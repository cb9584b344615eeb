"""Detection in images and in the frames of a source: letterbox, model, selection of boxes, and conversion back to
pixels of the images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.render.letterbox import Letterbox, fit_letterbox, letterbox
from engine.inference.model import InferenceModel, resolve_imgsz
from engine.inference.results import Boxes, Results
from engine.inference.sources import FileProblem, Frame, FrameStream, ReadAhead, SourceOptions, open_source
from engine.inference.tracks import ObjectTracks
from models.detector import CPU_CHUNK
from models.postprocess.detections import select_detections
from models.postprocess.selection import DETECTION_IOU, PostprocessSettings, detection_iou
from models.postprocess.tiles import TiledDetector, Tiles, ViewInput
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.class_names import class_numbers
from utils.config.flags import unused_settings
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS, DetectConfig, ValConfig
from utils.config.words import WORDS
from utils.detections import Detections
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.machine.threads import map_ahead
from utils.pixels import as_rgb8
from utils.schema import Bounds, Count, Fraction, checked_value, hints_of, plain_value, suggestion

BATCH_SIZE = 16  # on GPUs
MAX_THREADS = 4  # with a GPU, for reading and for drawing each


class ResolvedSettings(NamedTuple):
    """`DetectionSettings` with the defaults of a model."""

    imgsz: int  # longer side of the scaled image, pixels
    selection: PostprocessSettings  # thresholds, classes and so on


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """Settings of detection that a user chooses. Numbers and arrays of NumPy and torch become plain values. Raises
    UserError for values that no model takes."""

    imgsz: Count = 0  # longer side of the scaled image, pixels; 0: the model's
    # Confidence threshold. None: the one chosen by F1 in the validation of the checkpoint's epoch, if the checkpoint
    # stores it, else 0.25; also 0.25 without box voting, since it lowers the scores.
    conf: Fraction | None = None
    # IoU threshold of NMS. None: 0.45; for NMS-free models no NMS, unless ``agnostic``.
    iou: Fraction | None = None
    max_det: Annotated[int, Bounds(1, MAX_CANDIDATES)] = MAX_DETECTIONS  # per image or, with tiles, per tile
    classes: Sequence[int | str] | None = None  # return only these, by number or name; empty or None: all
    agnostic: bool = False  # boxes also suppress boxes of other classes
    box_voting: bool = True  # boxes suppressed by NMS refine the kept box and raise its score, if the model needs NMS

    def __post_init__(self) -> None:
        for name, hint in hints_of(DetectionSettings).items():
            value = getattr(self, name)
            checked = _checked_classes(value) if name == "classes" else checked_value(name, value, hint)
            object.__setattr__(self, name, checked)  # the dataclass is frozen

    def changed(self, keywords: Mapping[str, Any]) -> DetectionSettings:
        """Returns the settings changed by ``keywords``; None changes nothing. Raises UserError for unknown ones."""
        known = [field.name for field in fields(self)]
        for name, value in keywords.items():
            if name not in known:
                hint = WORDS["argument"].get(name) or f"the settings are {', '.join(known)}"
                raise UserError(f"{name}={value!r}: unknown{suggestion(name, known) or f'; {hint}'}")
        return replace(self, **{name: keywords[name] for name in known if keywords.get(name) is not None})

    def resolve(self, model: InferenceModel) -> ResolvedSettings:
        """Fills in the defaults of ``model``. Raises UserError for values that the model does not take."""
        imgsz = resolve_imgsz(self.imgsz, model)
        conf = self.conf
        if conf is None:
            conf = model.threshold(box_voting=self.box_voting)
            model.warn_of_size(imgsz)
        iou = self.iou
        if iou is None:
            iou = DETECTION_IOU if self.agnostic else detection_iou(model.nms_iou)
        selection = PostprocessSettings(
            conf_thres=conf,
            iou_thres=iou,
            max_det=self.max_det,
            agnostic=self.agnostic,
            multi_label=False,
            classes=class_numbers(self.classes or (), dict(enumerate(model.names)), "the model") or None,
            box_voting=self.box_voting and model.nms_iou is not None,
        )
        return ResolvedSettings(imgsz, selection)


def unused_detection_settings(
    config: ValConfig | DetectConfig, model: InferenceModel, tiles: Tiles | None
) -> list[str]:
    """Returns the lines of `unused_settings` for val.py or detect.py. ``tiles``: those into which images are cut; None:
    whole images."""
    needs_nms = model.nms_iou is not None
    has_no_whole = tiles is None or tiles.scaled
    table = [
        (not needs_nms, "box_voting", "the model's detections need no NMS"),
        (not model.is_unscored_branch, "nms", "the model has one branch"),
        (needs_nms and len(model.names) == 1, "agnostic_nms", "the model has one class"),
        (model.input_hw is not None, "rect", "the exported model takes images of one size"),
        (tiles is None, "overlap", "images are not cut into tiles"),
        (
            has_no_whole,
            "tile_full_image",
            "images are not cut into tiles, or the tiles of the training have no whole image",
        ),
    ]
    if isinstance(config, DetectConfig):
        is_undrawn = config.nosave and not config.view_img
        table.append((is_undrawn, "line_thickness hide_labels hide_conf", "nothing is drawn"))
        table.append((not config.save_txt, "save_conf", "there is no --save-txt"))
    return unused_settings(config, table)


def _checked_classes(classes: Any) -> list[int | str] | None:
    """Converts ``classes`` to a list; a single number or name is a list of one. Raises UserError for anything else."""
    plain = plain_value("classes", classes)
    if plain is None:
        return None
    chosen = plain if isinstance(plain, list) else [plain]
    if not all(isinstance(c, int | str) and not isinstance(c, bool) for c in chosen):
        raise UserError(f"classes: must be a list of class numbers or names, got {classes!r}")
    return chosen


class Canvases(NamedTuple):
    """Images of one canvas size, letterboxed."""

    numbers: list[int]  # of the images in a call
    pixels: Tensor  # uint8 or uint16 (B, h, w, C), pinned for a GPU
    image_hw: list[tuple[int, int]]  # sizes of the images, pixels
    fits: list[Letterbox]
    seconds: float  # duration of the letterboxing


class ImageDetections(NamedTuple):
    """The detections of an image."""

    # float64 (N, 6), highest score first: x1, y1, x2, y2 in pixels of the image, score, class. Of tracked objects
    # (N, 7), with the id before the score.
    rows: np.ndarray
    speed: dict[str, float]  # milliseconds by stage

    def result(self, frame: Frame, names: Mapping[int, str]) -> Results:
        """Returns them as the result of ``frame``."""
        height, width = frame.image.shape[:2]
        boxes = Boxes(torch.from_numpy(self.rows.astype(np.float32)), (height, width))
        time_s = frame.time_s if frame.is_video else None
        return Results(as_rgb8(frame.image), frame.path, names, boxes, self.speed, time_s=time_s)


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
        model = self.model
        rule = model.canvases(settings.imgsz)
        images_of_canvas: dict[tuple[int, int], list[int]] = {}
        for number, image in enumerate(images):
            height, width = image.shape[:2]
            canvas_hw = (height, width) if self.tiles else rule.canvas_hw((height, width))
            images_of_canvas.setdefault(canvas_hw, []).append(number)
        size = self.images_at_once(batch_size)
        for canvas_hw, all_numbers in images_of_canvas.items():
            for start in range(0, len(all_numbers), size):
                started = time.perf_counter()
                numbers = all_numbers[start : start + size]
                shape = (len(numbers), *canvas_hw, model.pixels.channels)
                pixels = torch.empty(shape, dtype=model.pixels.torch_dtype, pin_memory=model.device.type == "cuda")
                image_hw = [(images[number].shape[0], images[number].shape[1]) for number in numbers]
                fits = [fit_letterbox(hw, canvas_hw, None if self.tiles else settings.imgsz) for hw in image_hw]
                for number, fit, canvas in zip(numbers, fits, pixels.numpy()):
                    letterbox(images[number], canvas_hw, fit, canvas)
                yield Canvases(numbers, pixels, image_hw, fits, time.perf_counter() - started)

    def detect(self, prepared: Iterable[Canvases], settings: ResolvedSettings) -> list[ImageDetections]:
        """Runs detection on letterboxed images. Returns the detections of each image, in the order of the images."""
        detected: dict[int, ImageDetections] = {}
        for canvases in prepared:
            started = time.perf_counter()
            if self._thread is None:
                boxes, copied_at, computed_at = self._compute(canvases.pixels, settings)
            else:
                boxes, copied_at, computed_at = self._thread.submit(self._compute, canvases.pixels, settings).result()
            found = [_in_image(*image) for image in zip(boxes, canvases.image_hw, canvases.fits)]
            ms_per_image = 1e3 / len(canvases.numbers)
            speed = {
                "preprocess": (canvases.seconds + copied_at - started) * ms_per_image,
                "inference": (computed_at - copied_at) * ms_per_image,
                "postprocess": (time.perf_counter() - computed_at) * ms_per_image,
            }
            detected |= {number: ImageDetections(rows, speed) for number, rows in zip(canvases.numbers, found)}
        return [detected[number] for number in sorted(detected)]

    def _compute(self, canvases: Tensor, settings: ResolvedSettings) -> tuple[np.ndarray, float, float]:
        """Runs detection on canvases (B, h, w, C). Returns x1, y1, x2, y2, score and class of the detections, float32
        (B, K, 6), with zeros after the last one; and when canvases were copied to the device and the model was done,
        seconds."""
        model = self.model
        tiled: TiledDetector | None = None
        if self.tiles:
            batch = CPU_CHUNK if model.device.type == "cpu" else BATCH_SIZE
            tiled = TiledDetector(
                model,
                lambda _, raw: [_select(model, raw, settings)],
                tiles=self.tiles,
                view_input=ViewInput(stride=model.stride, imgsz=settings.imgsz, only_hw=model.input_hw, batch=batch),
                settings=[settings.selection],
            )
        with torch.inference_mode():
            # Permuted, the tensor is in NHWC memory format, like the model; uint8 is a quarter of the bytes to copy.
            pixels = canvases.to(model.device, non_blocking=True).permute(0, 3, 1, 2)
            pixels = pixels / 255 if model.pixels.bits == 8 else pixels.float() / 65535
            copied_at = self._now()
            with torch.autocast(model.device.type, self.amp, enabled=self.amp is not None):
                raw = (tiled or model)(pixels)
            computed_at = self._now()
            raw = [level.float() for level in raw]
            found = tiled.stitch(raw)[0] if tiled else _select(model, raw, settings)
            columns = (found.boxes_xyxy, found.scores[..., None], found.classes[..., None].float())
            boxes = torch.cat(columns, -1).cpu().numpy()  # one copy from the device
            self._warn_of_nan(boxes, raw)
        return boxes, copied_at, computed_at

    def _warn_of_nan(self, boxes: np.ndarray, raw: list[Tensor]) -> None:
        """Warns once of outputs that are not numbers. Raw outputs are looked at only if no box is found."""
        if self._has_warned:
            return
        is_empty = not boxes[..., 4].any()
        has_nan = torch.stack([level.isnan().any() for level in raw]).any() if is_empty else np.isnan(boxes).any()
        if not has_nan:
            return
        self._has_warned = True
        get_logger().warning(
            "%s: its outputs are not numbers (NaN), so %s; its weights are damaged, or too large for half precision: "
            "export without --half, or use --amp off",
            self.model.path,
            "nothing is found" if is_empty else "some boxes are left out",
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


def _select(model: InferenceModel, raw: list[Tensor], settings: ResolvedSettings) -> Detections:
    """Selects the detections in the model's raw outputs, float32."""
    return select_detections(*model.decode(raw), settings.selection)


def _in_image(rows: np.ndarray, image_hw: tuple[int, int], fit: Letterbox) -> np.ndarray:
    """Converts the detections of one image, float32 (K, 6) as `ImageDetector._compute` returns them, to those of
    `ImageDetections`. Those that are not numbers are left out; a side may be infinite, for boxes are clipped."""
    scores = rows[:, 4]
    rows = rows[(scores > 0) & np.isfinite(scores) & ~np.isnan(rows[:, :4]).any(-1)].astype(np.float64)
    boxes = letterbox_to_original(rows[:, :4], fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
    return np.concatenate([clip_xyxy(boxes, image_hw[1], image_hw[0]), rows[:, 4:]], 1)


class FrameResult(NamedTuple):
    """A frame and what was found in it."""

    frame: Frame
    result: Results


def detect_frames(
    source: FrameStream,
    detector: ImageDetector,
    settings: ResolvedSettings,
    *,
    ahead: ReadAhead,
    tracks: ObjectTracks | None = None,
) -> Generator[FrameResult | FileProblem, None, None]:
    """Yields the results of the frames of a source, in order, and the problems of its files at their places. An error
    of the source is raised after the frames before it.

    Args:
        source: frames and problems; it is closed at the end.
        ahead: largest number of frames in a batch. While the model runs, the next batch is read and letterboxed in
            another thread. If it is 0, frames are processed one by one, each before the next one is read.
        tracks: keeps only the detections that belong to tracks, which may be below the threshold of ``settings``;
            None: objects are not tracked.

    The generator must be closed by the thread that uses it; that ends its threads and releases the source.
    """
    names = dict(enumerate(detector.model.names))
    if tracks is not None:
        lowest = tracks.lowest_confidence
        settings = settings._replace(selection=replace(settings.selection, conf_thres=lowest))

    def batches() -> Iterator[list[Frame | FileProblem]]:
        batch: list[Frame | FileProblem] = []
        try:
            for item in source:
                if isinstance(item, Frame):
                    ahead.note(item)
                batch.append(item)
                if len(batch) >= max(ahead(), 1):
                    yield batch
                    batch = []
        except Exception:
            if batch:
                yield batch  # before the error is raised
            raise
        if batch:
            yield batch

    def prepare(batch: list[Frame | FileProblem]) -> tuple[list[Frame | FileProblem], list[Canvases]]:
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
                found = next(detected)
                if tracks is not None:
                    found = found._replace(rows=tracks.update(item, found.rows))
                yield FrameResult(item, found.result(item, names))


def open_detection(
    source: str,
    detector: ImageDetector,
    settings: ResolvedSettings,
    *,
    ahead: ReadAhead,
    tracks: ObjectTracks | None = None,
    vid_stride: int = 1,
    max_frames: int = 0,
) -> Generator[FrameResult | FileProblem, None, None]:
    """Opens ``source``, as `open_source` does, and returns the results of its frames, as `detect_frames` yields
    them."""
    options = SourceOptions(
        vid_stride=vid_stride,
        max_frames=max_frames,
        threads=detector.threads,
        ahead=ahead,
        pixels=detector.model.pixels,
        is_tracked=tracks is not None,
    )
    frames = open_source(source, options)
    return detect_frames(frames, detector, settings, ahead=ahead, tracks=tracks)
