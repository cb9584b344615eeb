"""Detection from Python: a `Predictor` maps images to `Results`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import torch

from engine.inference.detector import DetectionSettings, ImageDetector, detect_frames, open_detection
from engine.inference.images import Color, Source, as_frames, as_images
from engine.inference.model import InferenceModel, autocast_type, open_model
from engine.inference.results import ResultList, Results
from engine.inference.sources import FileProblem, ReadAhead
from engine.inference.tracks import ObjectTracks, TrackerSource
from models.postprocess.tiles import Tiles
from utils.config.words import attribute_error
from utils.errors import UserError, one_line
from utils.machine.devices import parse_devices
from utils.schema import Bounds, Count, checked_value, plain_value
from utils.strings import counted


class Predictor:
    """Maps images to their detections. Several threads may call one predictor."""

    task = "detect"
    model: InferenceModel
    device: torch.device  # the model's device
    names: dict[int, str]  # class names by number
    color: Color | None  # order of channels in arrays; None: each call gives it
    settings: DetectionSettings  # may be replaced between calls
    image_detector: ImageDetector

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
        self.color = color
        self.settings = DetectionSettings().changed(settings)
        self.settings.resolve(model)  # checks them
        self.image_detector = ImageDetector(model, autocast_type(model, amp), _tiles_of(model, tiles))

    def __repr__(self) -> str:
        imgsz, selection = self.settings.resolve(self.model)
        settings = f"imgsz={imgsz}, conf={selection.conf_thres:.3g}, device={str(self.device)!r}"
        return f"{type(self).__name__}({str(self.model.path)!r}, {counted(len(self.names), 'class')}, {settings})"

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError with the replacement, if there is one. Python calls it for missing attributes."""
        raise attribute_error("model", "a model", name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for an attribute that does not exist: programs of other packages set attributes such as
        ``conf``, which would have no effect here."""
        if name not in Predictor.__annotations__ and not hasattr(type(self), name):
            raise attribute_error("model", "a model", name)
        super().__setattr__(name, value)

    def __call__(
        self,
        source: Source | Sequence[Source],
        *,
        color: Color | None = None,
        batch_size: int = 0,
        verbose: bool = False,
        device: str | int | torch.device | None = None,
        **settings: Any,
    ) -> ResultList:
        """Runs detection on images. Returns a result for each, in order; a single image gives a list of one.

        Up to rounding, detections do not depend on the batch. Raises UserError for an image that cannot be used, or a
        setting that does not fit.

        Args:
            source: an image or a list of them, see `as_images`.
            color: the order of channels in arrays, "bgr" or "rgb"; None: that of `load`.
            batch_size: maximum number of images at once; 0: 16, but 1 on a CPU.
            verbose: print a line for each image.
            device: accepted for programs that name the device in each call; must equal the model's.
            settings: fields of `DetectionSettings`, for this call; None: the predictor's.
        """
        if device is not None:
            self.check_device(device)
        resolved = self.settings.changed(settings).resolve(self.model)
        frames = as_images(source, color or self.color, self.model.pixels)
        max_images = checked_value("batch_size", batch_size, Count)
        prepared = self.image_detector.prepare([frame.image for frame in frames], resolved, max_images)
        detected = self.image_detector.detect(prepared, resolved)
        results = ResultList(found.result(frame, self.names) for frame, found in zip(frames, detected))
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
        detector = self.image_detector
        if isinstance(source, str | os.PathLike | int):
            text = os.fspath(source) if isinstance(source, os.PathLike) else str(source)
            ahead = ReadAhead(detector.images_at_once())
            found = open_detection(text, detector, resolved, ahead=ahead, tracks=tracks, vid_stride=vid_stride)
        elif vid_stride != 1:
            raise UserError(f"vid_stride {vid_stride}: is for videos and streams; yield only every n-th image instead")
        else:
            frames = as_frames(source, color or self.color, self.model.pixels)
            # The caller may make an image only when it has the result of the one before.
            found = detect_frames(frames, detector, resolved, ahead=ReadAhead(0), tracks=tracks)

        def results() -> Iterator[Results]:
            with contextlib.closing(found):
                for item in found:
                    if isinstance(item, FileProblem):
                        item.log()
                    else:
                        yield item.result

        return results()

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
