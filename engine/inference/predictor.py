"""Detection from Python: a `Predictor` maps images to `Results`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.inference.frames import FileProblem, Frame, open_source
from engine.inference.images import Color, Source, as_frames, as_images, check_many
from engine.inference.model import InferenceModel, autocast_type
from engine.inference.object_tracks import ObjectTracks, TrackerSource, check_sequence
from engine.inference.open_model import is_exported, open_model
from engine.inference.results import ResultList, Results, attribute_error, boxes_of
from engine.inference.settings import Canvases, DetectionSettings, Pipeline
from models.postprocess.tiles import Tiles
from models.weights.download import fetch_weights
from utils.distributed.context import DistributedContext
from utils.errors import UserError, one_line
from utils.logger import configure_logging, get_logger
from utils.machine.devices import parse_devices
from utils.machine.resources import available_cores
from utils.machine.threads import Ahead, map_ahead
from utils.pixels import as_rgb8
from utils.strings import counted
from utils.structures import DetectionTable

AMP_TYPES = ("auto", "off", "bf16", "fp16")
THREADS = 4  # with a GPU: for reading, and as many for drawing


class SourceFrames:
    """The frames of `open_source`, whose problems are logged when they are read. ``failed``: why a file is not used, or
    its later frames are not. ``error``: what has ended the source, to be raised after the results of its frames."""

    def __init__(self, items: Iterator[Frame | FileProblem]) -> None:
        self._items, self.failed, self.error = items, dict[str, str](), None

    def __iter__(self) -> Iterator[Frame]:
        try:
            with contextlib.closing(self._items):
                for item in self._items:
                    if isinstance(item, FileProblem):
                        item.log()
                        if item.is_skipped:
                            self.failed[item.path] = item.reason
                    elif item.path not in self.failed:
                        yield item
                    elif item.is_live:  # it would never end by itself
                        return
        except Exception as error:
            self.error = error


@dataclass
class Detected:
    """What is found in a frame."""

    frame: Frame
    found: DetectionTable | Exception
    speed: dict[str, float]  # milliseconds by stage
    tracks: np.ndarray | None = None  # int64 (N,), ids of the tracks of ``found``; None: objects are not tracked
    drawing: np.ndarray | None = None  # uint8 (H, W, 3) RGB, with the boxes
    encoded: bytes = b""  # the drawing as an image file


class Predictor:
    """Maps images to their detections. Several threads may call one predictor.

    ``settings`` may be replaced between calls. ``names`` has the class names by number.
    """

    __slots__ = ("color", "device", "model", "names", "pipeline", "settings")  # others cannot be set
    task = "detect"

    def __init__(
        self,
        model: InferenceModel,
        *,
        amp: str = "off",
        color: Color | None = None,
        tiles: Tiles | bool = True,
        **settings: Any,
    ) -> None:
        """See `load` for the arguments. Raises UserError for settings that do not fit the model."""
        self.model, self.device, self.color = model, model.device, color
        self.names = dict(enumerate(model.names))
        given = DetectionSettings().changed(settings)
        fitted = given.fitted(model)
        self.settings = replace(given, imgsz=fitted.imgsz, conf=fitted.conf)
        if tiles is True:
            tiles = model.tile > 0 and Tiles(model.tile, full_image=False, scaled=True)
        if amp not in AMP_TYPES:
            raise UserError(f"amp: must be one of {', '.join(AMP_TYPES)}, got {amp!r}")
        self.pipeline = Pipeline(model, autocast_type(model, amp), tiles or None)

    def __repr__(self) -> str:
        fitted = self.settings.fitted(self.model)
        settings = f"imgsz={fitted.imgsz}, conf={fitted.conf:.3g}, device={str(self.device)!r}"
        return f"Predictor({str(self.model.path)!r}, {counted(len(self.names), 'class')}, {settings})"

    def __getattr__(self, name: str) -> Any:
        """Called for names that are not there."""
        raise attribute_error("model", "a model", name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for other attributes, which would have no effect."""
        if not hasattr(type(self), name):
            raise attribute_error("model", "a model", name)
        object.__setattr__(self, name, value)

    def __call__(
        self,
        source: Source | Sequence[Source],
        *,
        color: Color | None = None,
        batch_size: int = 0,
        verbose: bool = False,
        device: str | int | torch.device | None = None,
        **settings: Any,
    ) -> list[Results]:
        """A result for each image, in order; a single image gives a list of one.

        A batch gives the detections that its images give one by one, up to rounding. Raises UserError for an image that
        cannot be used, or a setting that does not fit.

        Args:
            source: an image or a list of them, see `as_images`.
            color: the order of channels in arrays, "bgr" or "rgb"; None: that of `load`.
            batch_size: the most images at once; 0: 16, but 1 on a CPU.
            verbose: print a line for each image.
            device: for programs that name the device in each call; it must be the model's.
            settings: of `DetectionSettings`, for this call; None or imgsz 0: the predictor's.
        """
        if device is not None:
            self.check_device(device)
        fitted = self._settings_of_call(settings)
        images = as_images(source, color or self.color, self.model.pixels)
        prepared = self.pipeline.prepare([image.image for image in images], fitted, batch_size)
        tables, speeds = self.pipeline.detect(prepared, fitted)
        results = ResultList(self._result(*parts) for parts in zip(images, tables, speeds))
        if verbose:
            for result in results:
                print(one_line(f"{result.path}: {result.verbose()}"))
        return results

    def check_device(self, device: str | int | torch.device) -> None:
        """Raises UserError unless ``device`` is the model's."""
        if parse_devices(str(device)) != (self.device,):
            raise UserError(f"device {device}: the model is on {self.device}; load() puts it on another")

    def _settings_of_call(self, keywords: dict[str, Any]) -> DetectionSettings:
        """The predictor's settings with those of a call. If the call turns box voting on or off, and nobody has chosen
        a threshold, it is the one for that."""
        settings = self.settings.changed(keywords)
        default = self.model.threshold(box_voting=self.settings.box_voting)
        if keywords.get("conf") is None and self.settings.conf == default:
            settings = replace(settings, conf=None)
        return settings.fitted(self.model)

    def stream(self, source: str | int | Path, *, vid_stride: int = 1) -> Iterator[Results]:
        """A result for each image of ``source``, one after another: an image, folder, glob, video, .txt list of files,
        webcam number or the URL of a stream, as for detect.py.

        Images and videos are read ahead and processed in batches; of a live stream, the newest frame is. An unreadable
        file is skipped with a warning if there are several. Raises UserError for an unreadable source.
        """
        if vid_stride < 1:
            raise UserError(f"vid_stride: must be at least 1, got {vid_stride}")
        ahead = Ahead(self.pipeline.images_at_once())
        frames = self.read(str(source), ahead, vid_stride=vid_stride)
        with contextlib.closing(self.detect_each(frames, ahead)) as found:
            yield from self._results(found)
        if frames.error:
            raise frames.error

    def track(
        self,
        source: str | os.PathLike[str] | int | Iterable[Source],
        *,
        tracker: TrackerSource = "bytetrack",
        vid_stride: int = 1,
        color: Color | None = None,
        **settings: Any,
    ) -> Iterator[Results]:
        """A result for each frame of ``source``, in order, with the detections that belong to tracks; ``boxes.id`` has
        the ids of these.

        Args:
            source: as of `stream`, or an iterable of images, each as in a call, which are processed one by one.
            tracker: "bytetrack", "botsort", "cbiou", "ocsort" or "sort", or a function that returns a tracker of the
                package trackers for each sequence (a video, a stream, or the images of a folder).
            vid_stride: read every n-th frame of videos and streams.
            color: as of a call, for the arrays of an iterable.
            settings: of `DetectionSettings`. Above ``conf``, detections begin tracks; lower ones continue tracks. A
                tracker that a function returns has its own thresholds, and gets the detections above 0.1 as well.

        Raises UserError as `stream`, for settings that do not fit, and without the package.
        """
        if vid_stride < 1:
            raise UserError(f"vid_stride: must be at least 1, got {vid_stride}")
        fitted = self._settings_of_call(settings)
        tracks = ObjectTracks(tracker, fitted.conf, vid_stride=vid_stride)
        ahead = Ahead(self.pipeline.images_at_once())
        if isinstance(source, str | os.PathLike | int):
            check_sequence(str(source))
            frames = self.read(str(source), ahead, vid_stride=vid_stride, by_number=True)
        else:
            check_many(source)
            frames = SourceFrames(as_frames(source, color or self.color, self.model.pixels))
        with contextlib.closing(self.track_each(frames, ahead, tracks, fitted)) as found:
            yield from self._results(found)
        if frames.error:
            raise frames.error

    def _results(self, found: Iterable[Detected]) -> Iterator[Results]:
        for item in found:
            if isinstance(item.found, Exception):
                raise item.found
            yield self._result(item.frame, item.found, item.speed, item.tracks)

    def read(self, source: str, ahead: Ahead, **options: Any) -> SourceFrames:
        """The frames of a source, as the model takes them. ``options``: of `open_source`."""
        return SourceFrames(open_source(source, threads=self.threads, ahead=ahead, pixels=self.model.pixels, **options))

    def track_each(
        self, frames: Iterable[Frame], ahead: Ahead, tracks: ObjectTracks, settings: DetectionSettings
    ) -> Iterator[Detected]:
        """What `detect_each` finds and ``tracks`` keeps. ``settings``: as by `DetectionSettings.fitted`."""
        needed = replace(settings, conf=tracks.lowest_confidence)
        with contextlib.closing(self.detect_each(frames, ahead, needed)) as detected:
            for item in detected:
                if not isinstance(item.found, Exception):
                    item.found, item.tracks = tracks.update(item.frame, item.found)
                yield item

    def detect_each(
        self, frames: Iterable[Frame], ahead: Ahead, settings: DetectionSettings | None = None
    ) -> Iterator[Detected]:
        """What is found in each of ``frames``, in order. ``settings``: as by `DetectionSettings.fitted`; None: the
        predictor's.

        A batch has at most ``ahead()`` frames; ``ahead`` learns the size of each. While the model runs, the next batch
        is read and letterboxed in another thread, but not of a live stream, whose frames are processed one by one.
        """
        settings, is_live = settings or self.settings.fitted(self.model), False

        def batches() -> Iterator[list[Frame]]:
            nonlocal is_live
            batch: list[Frame] = []
            for frame in frames:
                batch.append(frame)
                is_live = frame.is_live
                ahead.add(frame.image.nbytes)
                if is_live or len(batch) >= ahead():
                    yield batch
                    batch = []
            if batch:
                yield batch

        def prepare(batch: list[Frame]) -> tuple[list[Frame], list[Canvases] | None]:
            try:
                return batch, list(self.pipeline.prepare([frame.image for frame in batch], settings))
            except Exception:  # is raised again for the frames that it is about
                return batch, None

        prepared = map_ahead(prepare, batches(), threads=1, ahead=lambda: 0 if is_live else min(ahead(), 1))
        with contextlib.closing(prepared):
            for batch, canvases in prepared:
                yield from self._detect(batch, settings, canvases)

    def _detect(
        self, frames: Sequence[Frame], settings: DetectionSettings, canvases: list[Canvases] | None = None
    ) -> list[Detected]:
        """If a batch fails, its frames are processed one by one, so that an error is that of one frame."""
        try:
            prepared = canvases or self.pipeline.prepare([frame.image for frame in frames], settings)
            tables, speeds = self.pipeline.detect(prepared, settings)
        except Exception as error:
            if len(frames) == 1:
                return [Detected(frames[0], error, {})]
            return [detected for frame in frames for detected in self._detect([frame], settings)]
        return list(map(Detected, frames, tables, speeds))

    def detect(self, images: Sequence[np.ndarray]) -> list[DetectionTable]:
        """The detections in each of ``images``, uint8 (H, W, 3) RGB or of the model's pixels, highest score first."""
        settings = self.settings.fitted(self.model)
        return self.pipeline.detect(self.pipeline.prepare(images, settings), settings)[0]

    @property
    def threads(self) -> int:
        """Threads for reading and drawing: one on a CPU, whose cores the model uses."""
        return 1 if self.device.type == "cpu" else min(available_cores(), THREADS)

    def _result(
        self, frame: Frame, table: DetectionTable, speed: dict[str, float], tracks: np.ndarray | None = None
    ) -> Results:
        boxes = boxes_of(table, frame.image.shape[:2], tracks)
        return Results(as_rgb8(frame.image), frame.path, self.names, boxes, speed)


def load(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "",
    nms: bool = False,
    amp: str = "off",
    color: Color | None = None,
    tiles: Tiles | bool = True,
    trust: bool = False,
    **settings: Any,
) -> Predictor:
    """Opens a model for detection. Raises UserError for a file, name, device or settings that cannot be used.

    Args:
        path: a checkpoint, an exported file, or the name of public weights such as yolov8n, which are downloaded.
        device: "cpu", "mps", a GPU's number, or "" for the best available device.
        nms: use the one-to-many head of NMS-free models, with NMS.
        amp: autocast type of the model: "off", "bf16", "fp16", or "auto" for one that the device is fast in.
        color: the order of channels in arrays, "bgr" or "rgb"; None: it is given with each call.
        tiles: cut large images, as ``Tiles(640)``; True: as the model was trained; False: scale them to ``imgsz``.
        trust: as for `open_model`.
        settings: of `DetectionSettings`.
    """
    model = open_weights(path, device=device, nms=nms, trust=trust)
    return Predictor(model, amp=amp, color=color, tiles=tiles, **settings)


def open_weights(
    path: str | os.PathLike[str], *, device: str | int | torch.device = "", offline: bool = False, **options: bool
) -> InferenceModel:
    """The model of a file or of public weights, which are downloaded unless ``offline``. ``options``: of `open_model`;
    see `load`."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(f"{path!r}: is not a path; give a checkpoint, an exported file, or the name of public weights")
    devices = parse_devices(str(device))
    if len(devices) > 1:
        raise UserError(f"--device {device}: detection runs on one device; name one")
    if not Path(path).exists() and not is_exported(path):
        if not get_logger().hasHandlers():
            configure_logging(True)  # a download prints its address and license
        path = fetch_weights(str(path), ctx=DistributedContext.single(), offline=offline)
    return open_model(path, device=devices[0], **options)
