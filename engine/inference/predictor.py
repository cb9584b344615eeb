"""Detection from Python: a `Predictor` maps images to `Results`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
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
from engine.inference.settings import Canvases, DetectionSettings, Pipeline, ResolvedSettings
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
MAX_THREADS = 4  # with a GPU: for reading, and as many for drawing


class SourceFrames:
    """Yields the frames of `open_source`, and logs problems as they come up.

    Attributes:
        failed: reasons by file why it, or its later frames, are not used.
        error: the exception that has ended the source, to be raised after the results of its frames; None: none.
    """

    def __init__(self, items: Generator[Frame | FileProblem, None, None] | Generator[Frame, None, None]) -> None:
        self._items = items
        self.failed: dict[str, str] = {}
        self.error: Exception | None = None

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
    """The detections in a frame, or the error that prevented them."""

    frame: Frame
    outcome: DetectionTable | Exception
    speed: dict[str, float]  # milliseconds by stage
    tracks: np.ndarray | None = None  # int64 (N,), ids of the detections' tracks; None: objects are not tracked
    drawing: np.ndarray | None = None  # uint8 (H, W, 3) RGB, with the boxes
    encoded: bytes = b""  # the drawing as an image file


class Predictor:
    """Maps images to their detections. Several threads may call one predictor.

    ``settings`` may be replaced between calls. ``names`` has the class names by number.
    """

    __slots__ = ("color", "device", "model", "names", "pipeline", "settings")  # setting other attributes is an error
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
        self.model = model
        self.device = model.device
        self.color = color
        self.names = dict(enumerate(model.names))
        chosen = DetectionSettings().changed(settings)
        resolved = chosen.resolve(model)
        self.settings = replace(chosen, imgsz=resolved.imgsz, conf=resolved.conf)
        if tiles is True:
            tiles = model.tile > 0 and Tiles(model.tile, full_image=False, scaled=True)
        if amp not in AMP_TYPES:
            raise UserError(f"amp: must be one of {', '.join(AMP_TYPES)}, got {amp!r}")
        self.pipeline = Pipeline(model, autocast_type(model, amp), tiles or None)

    def __repr__(self) -> str:
        resolved = self.settings.resolve(self.model)
        settings = f"imgsz={resolved.imgsz}, conf={resolved.conf:.3g}, device={str(self.device)!r}"
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
        """Detects in images. Returns a result for each, in order; a single image gives a list of one.

        Up to rounding, detections do not depend on the batch. Raises UserError for an image that cannot be used, or a
        setting that does not fit.

        Args:
            source: an image or a list of them, see `as_images`.
            color: the order of channels in arrays, "bgr" or "rgb"; None: that of `load`.
            batch_size: maximum number of images at once; 0: 16, but 1 on a CPU.
            verbose: print a line for each image.
            device: for programs that name the device in each call; it must be the model's.
            settings: of `DetectionSettings`, for this call; None or imgsz 0: the predictor's.
        """
        if device is not None:
            self.check_device(device)
        resolved = self._settings_of_call(settings)
        images = as_images(source, color or self.color, self.model.pixels)
        prepared = self.pipeline.prepare([image.image for image in images], resolved, batch_size)
        detected = self.pipeline.detect(prepared, resolved)
        results = ResultList(self._result(image, table, speed) for image, (table, speed) in zip(images, detected))
        if verbose:
            for result in results:
                print(one_line(f"{result.path}: {result.verbose()}"))
        return results

    def check_device(self, device: str | int | torch.device) -> None:
        """Raises UserError unless ``device`` is the model's."""
        if parse_devices(str(device)) != (self.device,):
            raise UserError(f"device {device}: the model is on {self.device}; load() puts it on another")

    def _settings_of_call(self, keywords: dict[str, Any]) -> ResolvedSettings:
        """Returns the predictor's settings with those of a call.

        If the call turns box voting on or off, and nobody has chosen a threshold, the threshold changes accordingly.
        """
        settings = self.settings.changed(keywords)
        default = self.model.threshold(box_voting=self.settings.box_voting)
        if keywords.get("conf") is None and self.settings.conf == default:
            settings = replace(settings, conf=None)
        return settings.resolve(self.model)

    def stream(self, source: str | int | Path, *, vid_stride: int = 1) -> Iterator[Results]:
        """Yields a result for each image of ``source``: an image, folder, glob, video, .txt list of files, webcam
        number or the URL of a stream, as for detect.py.

        Images and videos are read ahead and processed in batches; of a live stream, only the newest frame is processed.
        An unreadable file is skipped with a warning if there are several. Raises UserError for an unreadable source.
        """
        if vid_stride < 1:
            raise UserError(f"vid_stride: must be at least 1, got {vid_stride}")
        ahead = Ahead(self.pipeline.images_at_once())
        frames = self.read(str(source), ahead, vid_stride=vid_stride)
        with contextlib.closing(self.detect_each(frames, ahead)) as detected:
            yield from self._results(detected)
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
        """Yields a result for each frame of ``source``, in order, with the detections that belong to tracks, whose ids
        are in ``boxes.id``.

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
        resolved = self._settings_of_call(settings)
        tracks = ObjectTracks(tracker, resolved.conf, vid_stride=vid_stride)
        ahead = Ahead(self.pipeline.images_at_once())
        if isinstance(source, str | os.PathLike | int):
            check_sequence(str(source))
            frames = self.read(str(source), ahead, vid_stride=vid_stride, by_number=True)
        else:
            check_many(source)
            frames = SourceFrames(as_frames(source, color or self.color, self.model.pixels))
        with contextlib.closing(self.track_each(frames, ahead, tracks, resolved)) as detected:
            yield from self._results(detected)
        if frames.error:
            raise frames.error

    def _results(self, detected: Iterable[Detected]) -> Iterator[Results]:
        for item in detected:
            if isinstance(item.outcome, Exception):
                raise item.outcome
            yield self._result(item.frame, item.outcome, item.speed, item.tracks)

    def read(self, source: str, ahead: Ahead, **options: Any) -> SourceFrames:
        """Opens a source. Its frames have the model's pixel format. ``options``: see `open_source`."""
        return SourceFrames(open_source(source, threads=self.threads, ahead=ahead, pixels=self.model.pixels, **options))

    def track_each(
        self, frames: Iterable[Frame], ahead: Ahead, tracks: ObjectTracks, settings: ResolvedSettings
    ) -> Generator[Detected, None, None]:
        """Yields the detections of `detect_each` that belong to ``tracks``."""
        needed = replace(settings, conf=tracks.lowest_confidence)
        with contextlib.closing(self.detect_each(frames, ahead, needed)) as detected:
            for item in detected:
                if not isinstance(item.outcome, Exception):
                    item.outcome, item.tracks = tracks.update(item.frame, item.outcome)
                yield item

    def detect_each(
        self, frames: Iterable[Frame], ahead: Ahead, settings: ResolvedSettings | None = None
    ) -> Generator[Detected, None, None]:
        """Yields the detections in each of ``frames``, in order. ``settings``: None: the predictor's.

        A batch has at most ``ahead()`` frames; ``ahead`` learns the size of each. While the model runs, the next batch
        is read and letterboxed in another thread, but not of a live stream, whose frames are processed one by one.
        """
        resolved = self.settings.resolve(self.model) if settings is None else settings
        batches = _Batches(frames, ahead)

        def prepare(batch: list[Frame]) -> tuple[list[Frame], list[Canvases] | None]:
            try:
                return batch, list(self.pipeline.prepare([frame.image for frame in batch], resolved))
            except Exception:  # `_detect` raises it again for the frame that causes it
                return batch, None

        with contextlib.closing(map_ahead(prepare, batches, threads=1, ahead=batches.prefetch)) as prepared:
            for batch, canvases in prepared:
                yield from self._detect(batch, resolved, canvases)

    def _detect(
        self, frames: Sequence[Frame], settings: ResolvedSettings, canvases: list[Canvases] | None = None
    ) -> list[Detected]:
        """Detects in a batch. If it fails, its frames are processed one by one, so that each error is that of one
        frame."""
        try:
            prepared = canvases or self.pipeline.prepare([frame.image for frame in frames], settings)
            detected = self.pipeline.detect(prepared, settings)
        except Exception as error:
            if len(frames) == 1:
                return [Detected(frames[0], error, {})]
            return [item for frame in frames for item in self._detect([frame], settings)]
        return [Detected(frame, table, speed) for frame, (table, speed) in zip(frames, detected)]

    def detect(self, images: Sequence[np.ndarray]) -> list[DetectionTable]:
        """Detects in each of ``images``, uint8 (H, W, 3) RGB or in the model's pixel format. Returns detections,
        highest score first."""
        settings = self.settings.resolve(self.model)
        return [table for table, _ in self.pipeline.detect(self.pipeline.prepare(images, settings), settings)]

    @property
    def threads(self) -> int:
        """Number of threads for reading and drawing: one on a CPU, whose cores the model uses."""
        return 1 if self.device.type == "cpu" else min(available_cores(), MAX_THREADS)

    def _result(
        self, frame: Frame, table: DetectionTable, speed: dict[str, float], tracks: np.ndarray | None = None
    ) -> Results:
        height, width = frame.image.shape[:2]
        boxes = boxes_of(table, (height, width), tracks)
        return Results(as_rgb8(frame.image), frame.path, self.names, boxes, speed)


class _Batches:
    """Groups frames to batches of at most ``ahead()`` frames; each frame of a live stream is a batch."""

    def __init__(self, frames: Iterable[Frame], ahead: Ahead) -> None:
        self._frames = frames
        self._ahead = ahead
        self._is_live = False  # whether the newest frame is of a live stream

    def __iter__(self) -> Iterator[list[Frame]]:
        batch: list[Frame] = []
        for frame in self._frames:
            batch.append(frame)
            self._is_live = frame.is_live
            self._ahead.add(frame.image.nbytes)
            if self._is_live or len(batch) >= self._ahead():
                yield batch
                batch = []
        if batch:
            yield batch

    def prefetch(self) -> int:
        """Returns how many batches may be prepared while the model runs."""
        return 0 if self._is_live else min(self._ahead(), 1)


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
    """Opens a file, or public weights, which are downloaded unless ``offline``. ``options``: see `open_model`."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(f"{path!r}: is not a path; give a checkpoint, an exported file, or the name of public weights")
    devices = parse_devices(str(device))
    if len(devices) > 1:
        raise UserError(f"--device {device}: detection runs on one device; name one")
    path = os.fspath(path)
    if not Path(path).exists() and not is_exported(path):
        if not get_logger().hasHandlers():
            configure_logging(True)  # a download prints its address and license
        path = fetch_weights(path, ctx=DistributedContext.single(), offline=offline)
    return open_model(path, device=devices[0], **options)
