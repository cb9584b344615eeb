"""Pictures to detect on: images, folders, globs, lists, videos, webcams and streams, as one sequence of frames."""

from __future__ import annotations

import glob
import math
import os
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from data.image_io.decode import IMAGE_SUFFIXES, read_image
from utils.errors import UserError
from utils.logger import get_logger


class LiveStream:
    """Reads ``capture`` in a thread and keeps one frame: whoever is slower than the stream misses frames, and never
    sees old ones. Takes over ``capture`` and releases it."""

    def __init__(self, capture: cv2.VideoCapture) -> None:
        self._capture = capture
        self._changed = threading.Condition()
        self._frame: np.ndarray | None = None  # not yet handed out
        self._number = 0  # frames read
        self._ended = False
        self._stop = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop:
            ok, frame = self._capture.read()
            with self._changed:
                self._ended = not ok
                if ok:
                    self._frame = frame
                    self._number += 1
                self._changed.notify()
            if not ok:
                return

    def next(self, timeout_s: float) -> tuple[int, np.ndarray] | None:
        """The number (from 0) and BGR picture of the newest frame not handed out yet; None when the stream has ended.

        Raises TimeoutError when none comes in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._frame is not None or self._ended, timeout_s):
                raise TimeoutError
            frame, self._frame = self._frame, None
            return None if frame is None else (self._number - 1, frame)

    def close(self) -> None:
        self._stop = True
        self._thread.join(timeout=1)
        if not self._thread.is_alive():  # a read that hangs holds on to the capture; the thread ends with the process
            self._capture.release()


VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".ts", ".gif"})
STREAM_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt"})
UNKNOWN_FPS = 25.0
STREAM_TIMEOUT_S = 30.0
EARLY_END = 0.95  # containers only estimate how many frames they hold


@dataclass(frozen=True)
class Frame:
    """One picture of a source."""

    path: str  # file, URL, or the webcam's number
    index: int  # frame in its video or stream; 0 for an image file
    image: np.ndarray  # uint8 (H, W, 3) RGB
    fps: float  # of the video or stream; 0 for an image file
    is_video: bool
    total: int | None  # frames of the video, 1 for an image file, None if not known


def open_source(
    source: str, *, vid_stride: int = 1, max_frames: int = 0, failed: dict[str, str] | None = None
) -> Iterator[Frame]:
    """The frames of ``source``, in order.

    Args:
        source: a file, a folder (its files, sorted), a glob (``**`` allowed), a .txt list of files (relative ones
            resolve from the list's folder), a webcam's number, or a stream's URL.
        vid_stride: of videos and streams take every n-th frame.
        max_frames: of each video or stream take at most this many; 0: all.
        failed: takes the files that were passed over, and why.

    An unreadable file among several is reported and passed over; a single one raises.

    Raises:
        UserError: at the call for what is missing or of no known kind; at iteration for what cannot be decoded.
    """
    source = str(source)
    if not source.strip():
        raise UserError("--source: is empty; name an image, folder, glob, video, list, webcam or URL")
    if source.isdigit() or urllib.parse.urlsplit(source).scheme.lower() in STREAM_SCHEMES:
        return _stream_frames(source, _open_stream(source), vid_stride, max_frames)
    return _file_frames(_list_files(source), source, vid_stride, max_frames, {} if failed is None else failed)


def _kind_of(path: Path) -> str:
    suffix = path.suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else ""


def _list_files(source: str) -> list[Path]:
    """The files that ``source`` means, none of unknown kind, at least one."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file() and _kind_of(entry))
        if not files:
            raise UserError(
                f"{source}: this folder holds no image or video (folders below it need a glob: {source}/**/*)"
            )
        return files
    if path.is_file():
        if path.suffix.lower() == ".txt":
            return _read_list(path)
        if not _kind_of(path):
            raise UserError(f"{source}: neither an image nor a video by its suffix '{path.suffix}'")
        return [path]
    if any(sign in source for sign in "*?["):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file() and _kind_of(p))
        if not files:
            raise UserError(f"{source}: the pattern matches no image or video")
        return files
    raise UserError(f"{source}: no such file or folder; a source is an image, folder, glob, video, list, webcam or URL")


def _read_list(path: Path) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    files = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file = path.parent / Path(line.strip()).expanduser()
        if not file.is_file():
            raise UserError(f"{path}:{number}: {line.strip()}: no such file")
        if not _kind_of(file):
            raise UserError(f"{path}:{number}: {line.strip()}: neither an image nor a video by its suffix")
        files.append(file)
    if not files:
        raise UserError(f"{path}: the list names no file")
    return files


def _file_frames(
    files: Sequence[Path], source: str, vid_stride: int, max_frames: int, failed: dict[str, str]
) -> Iterator[Frame]:
    usable = 0
    for path in files:
        try:
            if _kind_of(path) == "image":
                frames: Iterator[Frame] = iter([Frame(str(path), 0, read_image(path, _warn_of_damage), 0.0, False, 1)])
            else:
                frames = _video_frames(str(path), _open_video(path), vid_stride, max_frames)
        except UserError as error:
            if len(files) == 1:
                raise
            get_logger().warning("%s; passed over", error)
            failed[str(path)] = str(error)
            continue
        for frame in frames:
            usable += 1
            yield frame
    if not usable:
        raise UserError(f"{source}: none of its {len(files)} files can be read")


def _warn_of_damage(path: str, complaint: str) -> None:
    get_logger().warning("%s: is damaged (%s); what its decoder made of it is used", path, complaint)


def _open_capture(source: str | int) -> cv2.VideoCapture:
    """Without the decoders' own remarks: what they mean is said in one line by whoever finds the capture closed."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # read once, when OpenCV first opens a video
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        return cv2.VideoCapture(source)
    finally:
        cv2.utils.logging.setLogLevel(level)


def _open_video(path: Path) -> cv2.VideoCapture:
    capture = _open_capture(str(path))
    if not capture.isOpened():
        raise UserError(f"{path}: cannot be opened as a video (damaged, or a codec that this OpenCV lacks)")
    return capture


def _open_stream(source: str) -> cv2.VideoCapture:
    capture = _open_capture(int(source) if source.isdigit() else source)
    if not capture.isOpened():
        what = f"webcam {source}: is not there, or is in use" if source.isdigit() else f"{source}: cannot be opened"
        raise UserError(what)
    return capture


def _fps(capture: cv2.VideoCapture) -> float:
    fps = capture.get(cv2.CAP_PROP_FPS)
    return fps if math.isfinite(fps) and 0 < fps <= 1000 else UNKNOWN_FPS


def _length(capture: cv2.VideoCapture) -> int | None:
    count = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return int(count) if math.isfinite(count) and count > 0 else None


def _to_rgb(frame: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(frame, cv2.COLOR_GRAY2RGB if frame.ndim == 2 else cv2.COLOR_BGR2RGB)


def _video_frames(path: str, capture: cv2.VideoCapture, stride: int, max_frames: int) -> Iterator[Frame]:
    """Every ``stride``-th frame; those between are not decoded. A video that ends early is reported."""
    fps, total = _fps(capture), _length(capture)
    index = taken = 0
    try:
        while capture.grab():
            if index % stride == 0:
                ok, frame = capture.retrieve()
                if not ok:
                    break
                yield Frame(path, index, _to_rgb(frame), fps, True, total)
                taken += 1
                if taken == max_frames:
                    return
            index += 1
    finally:
        capture.release()
    if total is not None and index < EARLY_END * total:
        get_logger().warning("%s: ends after %d of %d frames (damaged?)", path, index, total)


def _stream_frames(source: str, capture: cv2.VideoCapture, stride: int, max_frames: int) -> Iterator[Frame]:
    """A URL of known length is a video, read whole; of a live stream the newest frame is taken each time."""
    if _length(capture) is not None:
        some = False
        for frame in _video_frames(source, capture, stride, max_frames):
            some = True
            yield frame
        if not some:
            raise UserError(f"{source}: no frame of it can be read; download it and name the file")
        return
    fps = _fps(capture)
    stream = LiveStream(capture)
    taken, due = 0, 0
    try:
        while not (max_frames and taken == max_frames):
            newest = stream.next(STREAM_TIMEOUT_S)
            if newest is None:
                break
            index, frame = newest
            if index < due:
                continue
            yield Frame(source, index, _to_rgb(frame), fps, True, None)
            taken, due = taken + 1, index + stride
    except TimeoutError:
        raise UserError(f"{source}: no frame for {STREAM_TIMEOUT_S:.0f} s") from None
    finally:
        stream.close()
    if not taken:
        raise UserError(f"{source}: ended before its first frame")
