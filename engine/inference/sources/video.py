"""Frames of videos, webcams and streams, which OpenCV reads."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Generator
from pathlib import Path

import cv2
import numpy as np

from data.images.decode import to_format
from engine.inference.sources.frames import FileProblem, Frame, FrameStream, SourceOptions
from engine.inference.sources.source_files import VIDEO_SUFFIXES, is_webcam
from utils.errors import UserError, os_reason
from utils.files.safe_io import open_regular
from utils.files.url import is_http, url_path, without_login
from utils.logger import get_logger
from utils.machine.threads import iterate_ahead

DEFAULT_FPS = 25.0  # for videos and streams that state no rate
STREAM_TIMEOUT_S = 30.0  # a live source without a frame for so long is lost
LOST_SOURCE_S = 60.0  # how long a lost live source is opened again before that is an error
RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # before each attempt to open it; the last one repeats
MIN_READ_FRACTION = 0.95  # fraction of the container's frame count, an estimate; below it, the video is damaged


def video_file_frames(path: Path, options: SourceOptions) -> FrameStream:
    """Yields the frames of a video, or the problem that prevents reading it."""
    try:
        open_regular(path).close()  # OpenCV would wait for a pipe's writer
    except OSError as error:
        reason = f"{path}: cannot be read ({os_reason(error)})"
        yield FileProblem(str(path), reason, is_skipped=True)
        return
    capture = _open_capture(str(path))
    if not capture.isOpened():
        reason = f"{path}: cannot be opened as a video (damaged, or a codec that this OpenCV lacks)"
        yield FileProblem(str(path), reason, is_skipped=True)
        return
    with contextlib.closing(iterate_ahead(_video_frames(str(path), capture, options), options.ahead)) as items:
        yield from items


def _video_frames(path: str, capture: cv2.VideoCapture, options: SourceOptions) -> FrameStream:
    """Yields every n-th frame; the others are not decoded. A video without a frame, or that ends early, is a
    problem."""
    fps = _fps(capture)
    total = _length(capture)
    index = 0
    taken = 0
    try:
        while capture.grab():
            if index % options.vid_stride == 0:
                ok, frame = capture.retrieve()
                if not ok:
                    break
                image = to_format(frame, path, options.pixels)
                yield Frame(path, image, index, fps, is_video=True, total=total, sequence=path)
                taken += 1
                if taken == options.max_frames:
                    return
            index += 1
    finally:
        capture.release()
    if not taken:
        reason = f"{path}: no frame can be read (damaged, or a codec that this OpenCV lacks)"
        yield FileProblem(path, reason, is_skipped=True)
    elif total is not None and index < MIN_READ_FRACTION * total:
        reason = f"{path}: ends after {index} of {total} frames (damaged, or OpenCV cannot read the rest)"
        yield FileProblem(path, reason, is_skipped=False)


def open_stream(source: str) -> cv2.VideoCapture:
    """Opens a webcam or a URL. Raises UserError if that fails."""
    if is_webcam(source):
        capture = _open_capture(int(source))
        message = f"webcam {source}: not found, or in use"
    else:
        capture = _open_capture(source)
        message = f"{without_login(source)}: cannot be opened"
    if not capture.isOpened():
        raise UserError(message)
    return capture


def stream_frames(source: str, capture: cv2.VideoCapture, options: SourceOptions) -> FrameStream:
    """Yields all frames of a video, which is a URL of known length, or the newest frames of a live source.

    Args:
        source: the URL with its login, or the number of a webcam.
        capture: as `open_stream` returns it.
        options: how many frames are read.

    A live source that is lost is opened again for `LOST_SOURCE_S`; then UserError is raised.
    """
    if _length(capture) is None:
        return _live_frames(source, capture, options)
    return _url_video_frames(without_login(source), capture, options)


def _url_video_frames(source: str, capture: cv2.VideoCapture, options: SourceOptions) -> FrameStream:
    is_empty = True
    with contextlib.closing(iterate_ahead(_video_frames(source, capture, options), options.ahead)) as items:
        for item in items:
            is_empty = is_empty and not isinstance(item, Frame)
            yield item
    if is_empty:
        raise UserError(f"{source}: no frame can be read; download the video and give its path")


def _live_frames(source: str, capture: cv2.VideoCapture, options: SourceOptions) -> FrameStream:
    name = without_login(source)
    fps = _fps(capture)
    taken = 0
    due = 0  # index of the next frame to yield
    with contextlib.closing(_frames_across_losses(source, capture, fps)) as frames:
        for index, frame in frames:
            if index >= due:
                image = to_format(frame, name, options.pixels)
                yield Frame(name, image, index, fps, is_video=True, total=None, is_live=True, sequence=name)
                taken += 1
                due = index + options.vid_stride
                if taken == options.max_frames:
                    return
    if not taken:
        raise UserError(f"{name}: ended before its first frame")


def _frames_across_losses(
    source: str, capture: cv2.VideoCapture, fps: float
) -> Generator[tuple[int, np.ndarray], None, None]:
    """Yields the positions, which also count the frames of the time in which the source was lost, and BGR images of the
    newest frames. Ends where a video ends whose length is unknown. Raises UserError if the source is lost for good."""
    name = without_login(source)
    position = -1
    lost_at: float | None = None
    while True:
        reason = f"{name}: the stream has ended"
        first = position + 1
        try:
            with contextlib.closing(NewestFrames(capture, name)) as frames:
                for number, frame in frames:
                    if lost_at is not None:
                        seconds = time.monotonic() - lost_at
                        get_logger().info("%s: is back after %.0f s", name, seconds)
                        first += round(seconds * fps)
                        lost_at = None
                    position = first + number
                    yield position, frame
        except UserError as error:
            if position < 0:
                raise
            reason = str(error)
        if position < 0 or _is_video_file(source):
            return
        if lost_at is None:
            lost_at = time.monotonic()
            get_logger().warning("%s; trying to open it again for %g s", reason, LOST_SOURCE_S)
        capture = _open_again(source, lost_at + LOST_SOURCE_S)


def _is_video_file(source: str) -> bool:
    """Returns whether a URL names a video file: its end is not a loss."""
    return is_http(source) and os.path.splitext(url_path(source))[1].lower() in VIDEO_SUFFIXES


def _open_again(source: str, deadline: float) -> cv2.VideoCapture:
    """Opens a lost source. Raises UserError if that has not succeeded by ``deadline``, of `time.monotonic`."""
    for pause in itertools.chain(RETRY_PAUSES_S, itertools.repeat(RETRY_PAUSES_S[-1])):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        time.sleep(min(pause, remaining))
        with contextlib.suppress(UserError):
            return open_stream(source)
    raise UserError(f"{without_login(source)}: was lost, and is not back after {LOST_SOURCE_S:g} s")


class NewestFrames:
    """Iterates over the numbers, from 0, and BGR images of the frames of a live stream, which a thread reads. A slow
    reader gets the newest frame, and skips older ones. It must be closed."""

    def __init__(self, capture: cv2.VideoCapture, source: str) -> None:
        """``source``: name of the stream, for messages."""
        self._capture = capture
        self._source = source
        # At most one frame, then the error or the end (None) of the stream.
        self._waiting: queue.SimpleQueue[tuple[int, np.ndarray] | Exception | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __iter__(self) -> NewestFrames:
        return self

    def __next__(self) -> tuple[int, np.ndarray]:
        """Raises UserError if a frame cannot be read, or none comes for `STREAM_TIMEOUT_S`."""
        try:
            item = self._waiting.get(timeout=STREAM_TIMEOUT_S)
        except queue.Empty:
            raise UserError(f"{self._source}: no frame for {STREAM_TIMEOUT_S:.0f} s") from None
        if item is None:
            raise StopIteration
        if isinstance(item, Exception):
            reason = getattr(item, "err", "") or item
            raise UserError(f"{self._source}: its frames cannot be read ({reason})") from item
        return item

    def close(self) -> None:
        """Stops the thread and releases the capture."""
        self._is_closed.set()
        self._thread.join(timeout=1)
        if not self._thread.is_alive():  # a blocked read still uses the capture; the thread ends with the process
            self._capture.release()

    def _read(self) -> None:
        """Reads frames until the stream ends or is closed."""
        try:
            for number in itertools.count():
                ok, frame = self._capture.read()
                if not ok or self._is_closed.is_set():
                    break
                with contextlib.suppress(queue.Empty):
                    self._waiting.get_nowait()  # an older frame
                self._waiting.put((number, frame))
            self._waiting.put(None)
        except Exception as error:
            self._waiting.put(error)


def _open_capture(source: str | int) -> cv2.VideoCapture:
    """Opens a capture without the decoders' messages. The caller must check that it is open."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # read once, when OpenCV first opens a video
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        return cv2.VideoCapture(source)
    finally:
        cv2.utils.logging.setLogLevel(level)


def _fps(capture: cv2.VideoCapture) -> float:
    fps = capture.get(cv2.CAP_PROP_FPS)
    return fps if 0 < fps <= 1000 else DEFAULT_FPS


def _length(capture: cv2.VideoCapture) -> int | None:
    count = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return int(count) if 0 < count < math.inf else None
