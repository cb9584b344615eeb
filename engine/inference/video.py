"""Frames of videos, webcams and streams, which OpenCV reads."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import threading
from collections.abc import Generator
from pathlib import Path

import cv2
import numpy as np

from data.image_io.channels import to_format
from engine.inference.frames import FileProblem, Frame, FrameStream, SourceOptions
from engine.inference.source_files import is_webcam
from utils.errors import UserError, os_reason
from utils.files.safe_io import open_regular
from utils.files.url import without_login
from utils.machine.threads import iterate_ahead

DEFAULT_FPS = 25.0  # for videos and streams that state no rate
STREAM_TIMEOUT_S = 30.0
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
    """Yields all frames of a video, which is a URL of known length, or the newest frames of a live stream."""
    if _length(capture) is not None:
        is_empty = True
        with contextlib.closing(iterate_ahead(_video_frames(source, capture, options), options.ahead)) as items:
            for item in items:
                is_empty = is_empty and not isinstance(item, Frame)
                yield item
        if is_empty:
            raise UserError(f"{source}: no frame can be read; download the video and give its path")
        return
    fps = _fps(capture)
    taken = 0
    due = 0  # index of the next frame to yield
    with contextlib.closing(newest_frames(capture, source)) as frames:
        for index, frame in frames:
            if index >= due:
                image = to_format(frame, source, options.pixels)
                yield Frame(source, image, index, fps, is_video=True, total=None, is_live=True, sequence=source)
                taken += 1
                due = index + options.vid_stride
                if taken == options.max_frames:
                    return
    if not taken:
        raise UserError(f"{source}: ended before its first frame")


def newest_frames(capture: cv2.VideoCapture, source: str) -> Generator[tuple[int, np.ndarray], None, None]:
    """Yields the numbers, from 0, and BGR images of the frames of a live stream. A slow reader gets the newest frame,
    and skips older ones. Releases ``capture`` at the end.

    Raises UserError if a frame cannot be read, or none comes for `STREAM_TIMEOUT_S`.
    """
    waiting: queue.SimpleQueue[tuple[int, np.ndarray] | Exception | None] = queue.SimpleQueue()
    is_closed = threading.Event()

    def read() -> None:
        try:
            for number in itertools.count():
                ok, frame = capture.read()
                if not ok or is_closed.is_set():
                    break
                with contextlib.suppress(queue.Empty):
                    waiting.get_nowait()  # an older frame
                waiting.put((number, frame))
            waiting.put(None)
        except Exception as error:
            waiting.put(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while (item := waiting.get(timeout=STREAM_TIMEOUT_S)) is not None:
            if isinstance(item, Exception):
                raise UserError(f"{source}: its frames cannot be read ({getattr(item, 'err', '') or item})") from item
            yield item
    except queue.Empty:
        raise UserError(f"{source}: no frame for {STREAM_TIMEOUT_S:.0f} s") from None
    finally:
        is_closed.set()
        thread.join(timeout=1)
        if not thread.is_alive():  # a blocked read still uses the capture; the thread ends with the process
            capture.release()


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
