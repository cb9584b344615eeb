"""Detection in images and in the frames of a source: a `Predictor` letterboxes images, runs a model, selects boxes, and
converts them back to pixels of the images, as `Results`."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from data.render.letterbox import Letterbox, fit_letterbox, letterbox
from engine.inference.images import Color, Source, frames_of, frames_of_iterable
from engine.inference.model import InferenceModel, autocast_type, open_model, resolve_imgsz
from engine.inference.results import Boxes, ResultList, Results
from engine.inference.sources import Frame, FrameStream, ReadAhead, SourceOptions, open_source
from engine.inference.tracks import ObjectTracks, TrackerSource
from models.postprocess.detections import select_detections
from models.postprocess.selection import DETECTION_IOU, PostprocessSettings, detection_iou
from models.postprocess.tiles import Select, TiledDetector, Tiles
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.class_names import class_numbers
from utils.config.flags import unused_settings
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS, DetectConfig, ValConfig
from utils.config.words import WORDS, attribute_error
from utils.detections import Detections
from utils.errors import UserError, one_line
from utils.machine.devices import parse_devices
from utils.machine.resources import available_cores
from utils.machine.threads import map_ahead
from utils.schema import Bounds, Count, Fraction, checked_value, hints_of, plain_value, suggestion

BATCH_SIZE = 16  # on GPUs
MAX_THREADS = 4  # with a GPU, for reading and for drawing each


class ResolvedSettings(NamedTuple):
    """`DetectionSettings` with the defaults of a model."""

    imgsz: int  # longer side of the scaled image, pixels
    selection: PostprocessSettings  # thresholds, classes and so on


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """Settings of detection that a user chooses; `changed` checks them."""

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

    def changed(self, keywords: Mapping[str, Any]) -> DetectionSettings:
        """Returns the settings changed by ``keywords``; None changes nothing. Numbers and arrays of NumPy and torch
        become plain values. Raises UserError for unknown names, and for values that no model takes."""
        hints = hints_of(DetectionSettings)
        values: dict[str, Any] = {}
        for name, value in keywords.items():
            if name not in hints:
                hint = WORDS["argument"].get(name) or f"the settings are {', '.join(hints)}"
                raise UserError(f"{name}={value!r}: unknown{suggestion(name, hints) or f'; {hint}'}")
            if value is not None:
                values[name] = _checked_classes(value) if name == "classes" else checked_value(name, value, hints[name])
        return replace(self, **values)

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


def _checked_classes(classes: Any) -> list[int | str]:
    """Converts ``classes`` to a list; a single number or name is a list of one. Raises UserError for anything else."""
    plain = plain_value("classes", classes)
    chosen = plain if isinstance(plain, list) else [plain]
    if not all(isinstance(c, int | str) and not isinstance(c, bool) for c in chosen):
        raise UserError(f"classes: must be a list of class numbers or names, got {classes!r}")
    return chosen


class Canvases(NamedTuple):
    """Frames that are letterboxed to one canvas size."""

    frames: dict[int, Frame]  # by their number in the batch
    pixels: Tensor  # uint8 or uint16 (B, h, w, C), pinned for a GPU
    fits: list[Letterbox]
    seconds: float  # duration of the letterboxing


class Predictor:
    """Maps images to their detections. Several threads may call one predictor."""

    __slots__ = ("amp", "color", "device", "model", "names", "settings", "tiles")  # others can't be set by mistake
    task = "detect"

    def __init__(
        self,
        model: InferenceModel,
        *,
        amp: str = "off",
        color: Color | None = None,
        tiles: Tiles | int | None = True,
        **settings: Any,
    ) -> None:
        """See `load` for the arguments. Raises UserError for settings that do not fit the model."""
        self.model = model
        self.device = model.device
        self.names = dict(enumerate(model.names))
        self.color = color  # order of channels in arrays; None: each call gives it
        self.settings = DetectionSettings().changed(settings)  # may be replaced between calls
        self.settings.resolve(model)  # checks them
        self.amp = autocast_type(model, amp)
        self.tiles = _tiles_of(model, tiles)  # how to cut images; None: scale them to the canvas
        if self.tiles:
            self.tiles.check(model.stride, model.input_hw)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError with the replacement, if there is one. Python calls it for missing attributes."""
        raise attribute_error("model", "a model", name)

    def __call__(
        self,
        source: Source | Sequence[Source],
        *,
        color: Color | None = None,
        verbose: bool = False,
        device: str | int | torch.device | None = None,
        **settings: Any,
    ) -> ResultList:
        """Runs detection on images. Returns a result for each, in order; a single image gives a list of one.

        Up to rounding, detections do not depend on the batch. Raises UserError for an image that cannot be used, or a
        setting that does not fit.

        Args:
            source: an image or a list of them, see `frames_of`.
            color: the order of channels in arrays, "bgr" or "rgb"; None: that of `load`.
            verbose: print a line for each image.
            device: accepted for programs that name the device in each call; must equal the model's.
            settings: fields of `DetectionSettings`, for this call; None: the predictor's.
        """
        if device is not None:
            self.check_device(device)
        resolved = self.settings.changed(settings).resolve(self.model)
        images = source if isinstance(source, list | tuple) else [cast(Source, source)]
        frames = list(frames_of(images, color or self.color, self.model.pixels))
        results = ResultList(self.detect(self.prepare(frames, resolved), resolved))
        if verbose:
            for result in results:
                print(one_line(f"{result.path}: {result.verbose()}"))
        return results

    def check_device(self, device: str | int | torch.device) -> None:
        """Raises UserError unless ``device`` is the model's."""
        if parse_devices(str(device)) != (self.device,):
            raise UserError(f"device {device}: the model is on {self.device}; load() puts it on another")

    def stream(
        self,
        source: str | os.PathLike[str] | int | Iterable[Source],
        *,
        vid_stride: int = 1,
        color: Color | None = None,
        tracker: TrackerSource | None = None,
        **settings: Any,
    ) -> Iterator[Results]:
        """Returns an iterator over the results of ``source``, one for each image or frame, in order.

        Images and videos are read ahead and processed in batches; of a live stream, only the newest frame is processed.
        An unreadable file is skipped with a warning if there are several.

        Args:
            source: an image, folder, glob, video, .txt list of files, webcam number or the URL of a stream, as for
                detect.py; or an iterable of images, each as in a call, which are processed one by one.
            vid_stride: read every n-th frame of videos and streams; not for an iterable.
            color: see `__call__`; for the arrays of an iterable.
            tracker: see `track`; None: objects are not tracked.
            settings: fields of `DetectionSettings`.

        Raises UserError for settings that do not fit and a source that cannot be used: at the call if it is missing or
        cannot be opened, in the iteration if it cannot be read.
        """
        resolved = self.settings.changed(settings).resolve(self.model)
        vid_stride = checked_value("vid_stride", vid_stride, Annotated[int, Bounds(1)])
        tracks = None if tracker is None else ObjectTracks(tracker, resolved.selection.conf_thres)
        if isinstance(source, str | os.PathLike | int):
            ahead = ReadAhead(self.images_at_once)
            options = SourceOptions(
                vid_stride, threads=self.threads, ahead=ahead, pixels=self.model.pixels, is_tracked=tracks is not None
            )
            frames = open_source(str(source) if isinstance(source, int) else os.fspath(source), options)
        elif vid_stride != 1:
            raise UserError(f"vid_stride {vid_stride}: is for videos and streams; yield only every n-th image instead")
        else:
            ahead = ReadAhead(0)  # the caller may make an image only when it has the result of the one before
            frames = frames_of_iterable(source, color or self.color, self.model.pixels)
        return self.detect_frames(frames, resolved, ahead=ahead, tracks=tracks)

    def track(
        self,
        source: str | os.PathLike[str] | int | Iterable[Source],
        *,
        tracker: TrackerSource = "bytetrack",
        vid_stride: int = 1,
        color: Color | None = None,
        **settings: Any,
    ) -> Iterator[Results]:
        """Returns an iterator over the results of `stream`, with the detections that belong to tracks, whose ids are in
        ``boxes.id``. The images of a folder, and those of an iterable, are one sequence.

        Args:
            source, vid_stride, color: see `stream`.
            tracker: "bytetrack", "botsort", "cbiou", "ocsort" or "sort", or a function that returns a tracker of the
                package trackers for each sequence (a video, a stream, or the images of a folder).
            settings: fields of `DetectionSettings`. Above ``conf``, detections begin tracks; lower ones continue
                tracks. A tracker that a function returns has its own thresholds, and gets the detections above 0.1 as
                well.

        Raises UserError like `stream`, and at the call if the package is missing.
        """
        return self.stream(source, tracker=tracker, vid_stride=vid_stride, color=color, **settings)

    @property
    def images_at_once(self) -> int:
        """The largest batch for the model: 1 with tiles, which are a batch, else the number that an exported file
        takes, or 16 (1 on a CPU)."""
        if self.tiles:
            return 1
        return self.model.batch or (1 if self.device.type == "cpu" else BATCH_SIZE)

    @property
    def threads(self) -> int:
        """Number of threads for reading and drawing: one on a CPU, whose cores the model uses."""
        return 1 if self.device.type == "cpu" else min(available_cores(), MAX_THREADS)

    def detect_frames(
        self, source: FrameStream, settings: ResolvedSettings, *, ahead: ReadAhead, tracks: ObjectTracks | None
    ) -> Generator[Results, None, None]:
        """Yields the results of the frames of a source, in order. An error of the source is raised after the batches
        before it.

        Args:
            source: it is closed at the end.
            ahead: largest number of frames in a batch. While the model runs, the next batch is read and letterboxed in
                another thread. If it is 0, frames are processed one by one, each before the next one is read.
            tracks: keeps only the detections that belong to tracks, which may be below the threshold of ``settings``;
                None: objects are not tracked.

        The generator must be closed by the thread that uses it; that ends its threads and releases the source.
        """
        if tracks is not None:
            selection = replace(settings.selection, conf_thres=tracks.lowest_confidence)
            settings = settings._replace(selection=selection)

        def batches() -> Iterator[list[Frame]]:
            batch: list[Frame] = []
            for frame in source:
                ahead.note(frame)
                batch.append(frame)
                if len(batch) >= max(ahead(), 1):
                    yield batch
                    batch = []
            if batch:
                yield batch

        def prepare(batch: list[Frame]) -> list[Canvases]:
            return list(self.prepare(batch, settings))

        prepared = map_ahead(prepare, batches(), threads=1, ahead=lambda: min(ahead(), 1))
        with contextlib.closing(source), contextlib.closing(prepared):  # the threads end first
            for canvases in prepared:
                for result in self.detect(canvases, settings):
                    yield result if tracks is None else tracks.update(result)

    def prepare(self, frames: Sequence[Frame], settings: ResolvedSettings) -> Iterator[Canvases]:
        """Letterboxes frames of any sizes, in the model's pixel format, into batches of one canvas size
        (`images_at_once`). Another thread can do it while the model runs."""
        pixel_format = self.model.pixels
        rule = self.model.canvases(settings.imgsz)
        numbers_by_canvas: dict[tuple[int, int], list[int]] = {}
        for number, frame in enumerate(frames):
            canvas_hw = frame.image_hw if self.tiles else rule.canvas_hw(frame.image_hw)
            numbers_by_canvas.setdefault(canvas_hw, []).append(number)
        size = self.images_at_once
        for canvas_hw, all_numbers in numbers_by_canvas.items():
            for start in range(0, len(all_numbers), size):
                started = time.perf_counter()
                batch = {number: frames[number] for number in all_numbers[start : start + size]}
                shape = (len(batch), *canvas_hw, pixel_format.channels)
                pixels = torch.empty(shape, dtype=pixel_format.torch_dtype, pin_memory=self.device.type == "cuda")
                fits = []
                for frame, canvas in zip(batch.values(), pixels.numpy()):
                    fit = fit_letterbox(frame.image_hw, canvas_hw, None if self.tiles else settings.imgsz)
                    letterbox(frame.image, canvas_hw, fit, canvas)
                    fits.append(fit)
                yield Canvases(batch, pixels, fits, time.perf_counter() - started)

    def detect(self, prepared: Iterable[Canvases], settings: ResolvedSettings) -> list[Results]:
        """Runs detection on letterboxed frames. Returns the result of each frame, in the order of the frames."""
        results: dict[int, Results] = {}
        thread = _model_thread(self.device)
        for canvases in prepared:
            started = time.perf_counter()
            if thread is None:
                rows, copied_at, computed_at = self._compute(canvases.pixels, settings)
            else:
                rows, copied_at, computed_at = thread.submit(self._compute, canvases.pixels, settings).result()
            boxes = [_in_image(*image) for image in zip(rows, canvases.frames.values(), canvases.fits)]
            ms_per_image = 1e3 / len(boxes)
            speed = {
                "preprocess": (canvases.seconds + copied_at - started) * ms_per_image,
                "inference": (computed_at - copied_at) * ms_per_image,
                "postprocess": (time.perf_counter() - computed_at) * ms_per_image,
            }
            for (number, frame), found in zip(canvases.frames.items(), boxes):
                results[number] = Results(frame, self.names, found, speed)
        return [results[number] for number in sorted(results)]

    def _detector(self, settings: ResolvedSettings) -> tuple[nn.Module, Select]:
        """Returns what is called with canvases, and what selects detections from its outputs."""
        model = self.model

        def select(raw: list[Tensor]) -> list[Detections]:
            return [select_detections(*model.decode(raw), settings.selection)]

        if not self.tiles:
            return model, select
        tiled = TiledDetector(
            model,
            select,
            [settings.selection],
            tiles=self.tiles,
            stride=model.stride,
            imgsz=settings.imgsz,
            only_hw=model.input_hw,
            batch=BATCH_SIZE,
        )
        return tiled, tiled.stitch

    def _compute(self, canvases: Tensor, settings: ResolvedSettings) -> tuple[np.ndarray, float, float]:
        """Runs detection on canvases (B, h, w, C). Returns x1, y1, x2, y2, score and class of the detections, float32
        (B, K, 6), with zeros after the last one; and when canvases were copied to the device and the model was done,
        seconds."""
        model = self.model
        detector, select = self._detector(settings)
        with torch.inference_mode():
            # Permuted, the tensor is in NHWC memory format, like the model; uint8 is a quarter of the bytes to copy.
            pixels = canvases.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
            pixels = pixels / 255 if model.pixels.bits == 8 else pixels.float() / 65535
            copied_at = _time_of(self.device)
            with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
                raw = detector(pixels)
            computed_at = _time_of(self.device)
            raw = [level.float() for level in raw]
            (found,) = select(raw)
            columns = (found.boxes_xyxy, found.scores[..., None], found.classes[..., None].float())
            boxes = torch.cat(columns, -1).cpu().numpy()  # one copy from the device
            is_empty = not boxes[..., 4].any()
            # Raw outputs are looked at only if no box is found.
            has_nan = any(level.isnan().any() for level in raw) if is_empty else np.isnan(boxes).any()
            if has_nan:
                model.warn_of_nan("nothing is found" if is_empty else "some boxes are left out")
        return boxes, copied_at, computed_at


@functools.cache
def _model_thread(device: torch.device) -> ThreadPoolExecutor | None:
    """Starts the thread that runs all models on a GPU, whoever calls them; None for other devices, which need none.

    cuDNN's plans belong to a thread: each new thread would search for kernels again (pytorch#191744), and their memory
    would never be freed (pytorch#169153).
    """
    return ThreadPoolExecutor(1) if device.type == "cuda" else None


def _time_of(device: torch.device) -> float:
    """Returns the time in seconds once a GPU has finished, so that each stage counts only its own work."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _in_image(rows: np.ndarray, frame: Frame, fit: Letterbox) -> Boxes:
    """Converts the detections of one image, float32 (K, 6) as `Predictor._compute` returns them, to pixels of the
    image. Those that are not numbers are left out; a side may be infinite, for boxes are clipped."""
    scores = rows[:, 4]
    rows = rows[(scores > 0) & np.isfinite(scores) & ~np.isnan(rows[:, :4]).any(-1)].astype(np.float64)
    boxes = letterbox_to_original(rows[:, :4], fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
    height, width = frame.image_hw
    rows = np.concatenate([clip_xyxy(boxes, width, height), rows[:, 4:]], 1)
    return Boxes(torch.from_numpy(rows.astype(np.float32)), frame.image_hw)


def _tiles_of(model: InferenceModel, tiles: Tiles | int | None) -> Tiles | None:
    """Returns how to cut images; None: not at all. ``tiles``: see `load`."""
    if tiles is None or isinstance(tiles, Tiles):
        return tiles
    plain = plain_value("tiles", tiles)
    if plain is True:
        return Tiles.as_trained(model.tile) if model.tile else None
    size = 0 if plain is False else checked_value("tiles", plain, Count)
    return Tiles(size) if size else None


def load(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "",
    nms: bool = False,
    amp: str = "off",
    color: Color | None = None,
    tiles: Tiles | int | None = True,
    trust: bool = False,
    **settings: Any,
) -> Predictor:
    """Opens a model for detection. Raises UserError for a file, name, device or settings that cannot be used.

    Args:
        path: a checkpoint, an exported file, or the name of public weights such as yolov8n, which are downloaded.
        device: "cpu", "mps", a GPU's number, or "" for the best available device.
        nms: use the one-to-many head of NMS-free models, with NMS.
        amp: autocast type of the model: "off", "bf16", "fp16", or "auto" for a fast type on the device.
        color: the order of channels in arrays, "bgr" or "rgb"; None: it is given with each call.
        tiles: cut large images into tiles of this size in pixels, or as `Tiles` describes; True: as the model was
            trained; False: scale them to ``imgsz``.
        trust: as for `open_model`.
        settings: fields of `DetectionSettings`.
    """
    model = open_model(path, device=device, nms=nms, trust=trust)
    return Predictor(model, amp=amp, color=color, tiles=tiles, **settings)


def unused_detection_settings(
    config: ValConfig | DetectConfig, model: InferenceModel, tiles: Tiles | None
) -> list[str]:
    """Returns the lines of `unused_settings` for val.py or detect.py. ``tiles``: those into which images are cut; None:
    whole images."""
    needs_nms = model.nms_iou is not None
    table = [
        (not needs_nms, "box_voting", "the model's detections need no NMS"),
        (not model.is_unscored_branch, "nms", "the model has one branch"),
        (needs_nms and len(model.names) == 1, "agnostic_nms", "the model has one class"),
        (model.input_hw is not None, "rect", "the exported model takes images of one size"),
        (tiles is None, "overlap", "images are not cut into tiles"),
        (
            tiles is None or tiles.scaled,
            "tile_full_image",
            "images are not cut into tiles, or the tiles of the training have no whole image",
        ),
    ]
    if isinstance(config, DetectConfig):
        is_undrawn = config.nosave and not config.view_img
        table.append((is_undrawn, "line_thickness hide_labels hide_conf", "nothing is drawn"))
        table.append((not config.save_txt, "save_conf", "there is no --save-txt"))
    return unused_settings(config, table)
