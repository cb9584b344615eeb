"""Detection in the frames of a source, which are read ahead, processed in batches and returned in order."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeAlias

import numpy as np

from engine.inference.image_detector import Canvases, ImageDetector
from engine.inference.object_tracks import ObjectTracks
from engine.inference.read_ahead import ReadAheadLimit
from engine.inference.settings import ResolvedSettings
from engine.inference.sources.frames import FileProblem, Frame, FrameStream, SourceOptions
from engine.inference.sources.open_source import open_source
from utils.detections import DetectionTable
from utils.machine.threads import map_ahead


@dataclass
class FrameDetections:
    """The detections in a frame, or the error that prevented them."""

    frame: Frame
    outcome: DetectionTable | Exception
    speed: dict[str, float]  # milliseconds by stage
    tracks: np.ndarray | None = None  # int64 (N,), ids of the detections' tracks; None: objects are not tracked


FrameBatch: TypeAlias = list[Frame | FileProblem]


class DetectionStream:
    """Iterates over the frames of a source, in order, with the detections in each.

    The iteration also reports every problem, at its place among the frames:

    - a `FileProblem`, if a file cannot be read, in whole or in part;
    - a `FrameDetections` whose outcome is an exception, if detection in a frame fails;
    - an exception that is raised, if the source ends with an error, or cannot be used at all.

    The stream must be closed: as a context manager, it stops its threads and releases the source at the end.
    """

    def __init__(
        self,
        source: FrameStream,
        detector: ImageDetector,
        settings: ResolvedSettings,
        *,
        ahead: ReadAheadLimit,
        tracks: ObjectTracks | None = None,
    ) -> None:
        """Reads nothing before the first result is requested.

        Args:
            source: frames and problems, which the stream closes.
            ahead: limits the size of a batch, and is told the size of each frame. While the model runs, the next batch
                is read and letterboxed in another thread. With a limit of 0, as for a live stream, frames are processed
                one by one, each before the next one is read.
            tracks: keeps only the detections that belong to tracks, which may be below the threshold of ``settings``;
                None: objects are not tracked.
        """
        self.ahead = ahead
        self._source = source
        self._detector = detector
        self._settings = settings
        if tracks is not None:
            self._settings = replace(settings, conf=tracks.lowest_confidence)
        self._tracks = tracks
        self._is_live = False  # whether the newest frame is of a live stream
        self._skipped: set[str] = set()
        self._prepared = map_ahead(self._prepare, self._batches(), threads=1, ahead=self._batches_ahead)
        self._results = self._detect_in_batches()

    def __iter__(self) -> Iterator[FrameDetections | FileProblem]:
        return self

    def __next__(self) -> FrameDetections | FileProblem:
        return next(self._results)

    def __enter__(self) -> DetectionStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the threads and releases the source. The thread that iterates must call it."""
        for stage in (self._results, self._prepared, self._source):
            stage.close()

    def skip(self, path: str) -> None:
        """Leaves out the frames of a file that have not been read yet. Any thread may call it."""
        self._skipped.add(path)

    def _batches(self) -> Iterator[FrameBatch]:
        """Yields batches of up to ``ahead()`` frames, or one of a live stream, with file problems between them."""
        batch: FrameBatch = []
        count = 0  # frames in the batch
        try:
            for item in self._source:
                if isinstance(item, Frame):
                    if item.path in self._skipped:
                        if item.is_live:  # it would never end by itself
                            break
                        continue
                    count += 1
                    self._is_live = item.is_live
                    self.ahead.add(item.image.nbytes)
                batch.append(item)
                if self._is_live or count >= max(self.ahead(), 1):
                    yield batch
                    batch = []
                    count = 0
        except Exception:
            if batch:
                yield batch  # before the error is raised
            raise
        if batch:
            yield batch

    def _batches_ahead(self) -> int:
        """Returns how many batches may be prepared while the model runs."""
        return 0 if self._is_live else min(self.ahead(), 1)

    def _prepare(self, batch: FrameBatch) -> tuple[FrameBatch, list[Canvases] | None]:
        """Letterboxes the frames of a batch. If it fails, returns None, and `_detect` tries again for each frame."""
        images = [frame.image for frame in frames_of(batch)]
        try:
            return batch, list(self._detector.prepare(images, self._settings))
        except Exception:
            return batch, None

    def _detect_in_batches(self) -> Generator[FrameDetections | FileProblem, None, None]:
        for batch, canvases in self._prepared:
            detected = iter(self._detect(frames_of(batch), canvases))
            for item in batch:
                yield self._tracked(next(detected)) if isinstance(item, Frame) else item

    def _detect(self, frames: Sequence[Frame], canvases: list[Canvases] | None = None) -> list[FrameDetections]:
        """Runs detection on frames. If it fails, they are processed one by one, so that each error belongs to one
        frame.

        ``canvases``: the letterboxed frames; None: they are not letterboxed yet.
        """
        try:
            if canvases is None:
                canvases = list(self._detector.prepare([frame.image for frame in frames], self._settings))
            detected = self._detector.detect(canvases, self._settings)
        except Exception as error:
            if len(frames) == 1:
                return [FrameDetections(frames[0], error, {})]
            return [item for frame in frames for item in self._detect([frame])]
        return [FrameDetections(frame, table, speed) for frame, (table, speed) in zip(frames, detected)]

    def _tracked(self, item: FrameDetections) -> FrameDetections:
        """Keeps only the detections that belong to tracks, if objects are tracked."""
        if self._tracks is None or isinstance(item.outcome, Exception):
            return item
        table, tracks = self._tracks.update(item.frame, item.outcome)
        return replace(item, outcome=table, tracks=tracks)


def frames_of(batch: FrameBatch) -> list[Frame]:
    return [item for item in batch if isinstance(item, Frame)]


def open_detection_stream(
    source: str,
    detector: ImageDetector,
    settings: ResolvedSettings,
    *,
    vid_stride: int,
    max_frames: int = 0,
    tracks: ObjectTracks | None = None,
    reads_ahead: bool = True,
) -> DetectionStream:
    """Opens a source for detection.

    Args:
        source: see `open_source`.
        vid_stride, max_frames: see `SourceOptions`.
        tracks: see `DetectionStream`.
        reads_ahead: read and process files in batches; otherwise each frame is read when it is requested.

    Raises UserError like `open_source`.
    """
    ahead = ReadAheadLimit(detector.images_at_once() if reads_ahead else 0)
    options = SourceOptions(
        vid_stride=vid_stride,
        max_frames=max_frames,
        threads=detector.threads,
        ahead=ahead,
        pixels=detector.model.pixels,
        in_sequences=tracks is not None,
    )
    return DetectionStream(open_source(source, options), detector, settings, ahead=ahead, tracks=tracks)
