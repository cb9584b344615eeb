"""Frames of images, folders, globs, lists, videos, webcams and streams."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from data.image_io.channels import to_format
from data.image_io.decode import ARRAY_SUFFIX, IMAGE_SUFFIXES, image_suffixes, read_image, unread_image, unread_summary
from utils.config.pixels import RGB8, PixelFormat
from utils.errors import UserError
from utils.files.safe_io import open_regular
from utils.logger import get_logger
from utils.machine.threads import iterate_ahead, map_ahead


class LiveStream:
    """Reads ``capture`` in a thread and keeps only the newest frame, so a slow reader skips some. Releases it."""

    def __init__(self, capture: cv2.VideoCapture) -> None:
        self._capture = capture
        self._changed = threading.Condition()
        self._frame: np.ndarray | None = None  # the newest, until `next` returns it
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
        """Number, from 0, and BGR image of a new frame; None when the stream has ended. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._frame is not None or self._ended, timeout_s):
                raise TimeoutError
            frame, self._frame = self._frame, None
            return None if frame is None else (self._number - 1, frame)

    def close(self) -> None:
        self._stop = True
        self._thread.join(timeout=1)
        if not self._thread.is_alive():  # a blocked read still uses the capture; the thread ends with the process
            self._capture.release()


VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".ts", ".gif"})
STREAM_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt"})
UNKNOWN_FPS = 25.0
STREAM_TIMEOUT_S = 30.0
EARLY_END = 0.95  # fraction of the frames; containers only estimate their number


@dataclass(frozen=True)
class Frame:
    """One image of a source."""

    path: str  # file, URL without user and password, or number of a webcam
    index: int  # in its video or stream; 0 for an image file
    image: np.ndarray  # uint8 (H, W, 3) RGB, or of another `PixelFormat`
    fps: float  # of the video or stream; 0 for an image file
    is_video: bool
    total: int | None  # frames of the video, 1 for an image file, None if unknown
    is_live: bool = False  # the newest frame of a webcam or stream


@dataclass(frozen=True)
class FileProblem:
    """A problem with a file of a source, reported between the frames."""

    path: str
    reason: str
    is_skipped: bool  # nothing of the file is used

    def log(self) -> None:
        get_logger().warning("%s%s", self.reason, "; skipped" if self.is_skipped else "")


def open_source(
    source: str,
    *,
    vid_stride: int = 1,
    max_frames: int = 0,
    threads: int = 1,
    ahead: Callable[[], int] = lambda: 0,
    pixels: PixelFormat = RGB8,
) -> Iterator[Frame | FileProblem]:
    """Yields the frames of ``source``, in order, and the problems of its files.

    Args:
        source: a file, a folder (its files, sorted), a glob (``**`` allowed), a .txt list of files (relative to the
            list's folder; each is read once), the number of a webcam, or the URL of a stream.
        vid_stride: read every n-th frame of videos and streams.
        max_frames: of each video or stream; 0: all.
        threads: that decode image files; a video is decoded in one.
        ahead: the most frames of files that are decoded in advance.
        pixels: of the frames.

    Raises UserError: at the call for a missing source or an unknown file type; at iteration for an unreadable file,
    which is skipped if the source has others.
    """
    source = str(source)
    if _is_stream(source):
        return _in_format(_stream_frames(_shown(source), _open_stream(source), vid_stride, max_frames, ahead), pixels)
    files, unread = _list_files(source, image_suffixes(pixels))
    if unread:
        get_logger().warning("%s: %s", source, unread_summary(unread))
    read = partial(_read_image, pixels=pixels)
    return _in_format(_file_frames(files, source, read, vid_stride, max_frames, threads, ahead), pixels)


def _in_format(items: Iterator[Frame | FileProblem], pixels: PixelFormat) -> Iterator[Frame | FileProblem]:
    """Converts the frames of videos, which are RGB, to ``pixels``."""
    with contextlib.closing(items):
        for item in items:
            if isinstance(item, Frame) and item.is_video and pixels != RGB8:
                item = replace(item, image=to_format(item.image, item.path, pixels, is_rgb=True))
            yield item


def check_source(source: str) -> None:
    """Raises UserError for files that `open_source` refuses for any pixels. Webcams and streams are not opened."""
    if not _is_stream(source):
        _list_files(source, IMAGE_SUFFIXES | {ARRAY_SUFFIX})


def _is_stream(source: str) -> bool:
    scheme, separator, _ = source.partition("://")
    return _is_webcam(source) or (bool(separator) and scheme.lower() in STREAM_SCHEMES)


def _is_webcam(source: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,9}", source))


def _shown(source: str) -> str:
    """A URL without its user and password, which do not belong in logs, file names and results."""
    return re.sub("(?<=://)[^/?#]*@", "", source)


def _kind_of(path: Path, images: frozenset[str]) -> str:
    suffix = path.suffix.lower()
    return "image" if suffix in images else "video" if suffix in VIDEO_SUFFIXES else ""


def _check_kind(path: Path, named: str, images: frozenset[str]) -> None:
    """Raises UserError, which begins with ``named``, if ``path`` is neither an image nor a video."""
    if not _kind_of(path, images):
        what = f"'{path.suffix}' is not the suffix of an image or a video"
        raise UserError(f"{named}: {unread_image(path) or what}")


def _select(paths: Iterable[Path], nothing: str, images: frozenset[str]) -> tuple[list[Path], list[str]]:
    """See `_list_files`. Raises UserError, which begins with ``nothing``, if there is neither an image nor a video."""
    files, unread = [], []
    for path in sorted(path for path in paths if not path.is_dir()):
        if _kind_of(path, images):
            files.append(path)  # a broken link is reported later, like any file that cannot be read
        elif what := unread_image(path):
            unread.append(f"{path}: {what}")
    if not files:
        raise UserError(f"{nothing}; {unread_summary(unread)}" if unread else nothing)
    return files, unread


def _list_files(source: str, images: frozenset[str]) -> tuple[list[Path], list[str]]:
    """The images (files with the suffixes ``images``) and videos that ``source`` names, at least one; and others, as
    `unread_summary` takes them."""
    if not source.strip():
        raise UserError("--source: is empty; name an image, folder, glob, video, list, webcam or URL")
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        nothing = f"{source}: no image or video in this folder (use a glob for its subfolders: {source}/**/*)"
        return _select(path.iterdir(), nothing, images)
    if path.is_file():
        if path.suffix.lower() == ".txt":
            return _read_list(path, images), []
        _check_kind(path, source, images)
        return [path], []
    if any(sign in source for sign in "*?["):
        found = map(Path, glob.glob(str(path), recursive=True))
        return _select(found, f"{source}: the pattern matches no image or video", images)
    raise UserError(f"{source}: no such file or folder; a source is an image, folder, glob, video, list, webcam or URL")


def _read_list(path: Path, images: frozenset[str]) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    files = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file = path.parent / os.path.expanduser(line.strip())
        if not file.is_file():
            raise UserError(f"{path}:{number}: {line.strip()}: no such file")
        _check_kind(file, f"{path}:{number}: {line.strip()}", images)
        files.append(file)
    if not files:
        raise UserError(f"{path}: the list names no file")
    return list(dict.fromkeys(files))


def _file_frames(
    files: Sequence[Path],
    source: str,
    read_image: Callable[[Path], list[Frame | FileProblem] | None],
    vid_stride: int,
    max_frames: int,
    threads: int,
    ahead: Callable[[], int],
) -> Iterator[Frame | FileProblem]:
    usable = 0
    for path, read in zip(files, map_ahead(read_image, files, threads=threads, ahead=ahead)):
        for item in _read_video(path, vid_stride, max_frames, ahead) if read is None else read:
            if isinstance(item, Frame):
                usable += 1
            elif item.is_skipped and len(files) == 1:
                raise UserError(item.reason)
            yield item
    if not usable:
        raise UserError(f"{source}: none of its {len(files)} files can be read")


def _read_image(path: Path, pixels: PixelFormat) -> list[Frame | FileProblem] | None:
    """None for a video, which is opened only when the files before it are finished."""
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return None
    found: list[Frame | FileProblem] = []

    def on_warning(name: str, warning: str) -> None:
        found.append(FileProblem(name, f"{name}: is damaged ({warning}); it is used as decoded", False))

    try:
        found.append(Frame(str(path), 0, read_image(path, on_warning, pixels), 0.0, False, 1))
    except UserError as error:
        found.append(FileProblem(str(path), str(error), True))
    return found


def _read_video(
    path: Path, vid_stride: int, max_frames: int, ahead: Callable[[], int]
) -> Iterator[Frame | FileProblem]:
    try:
        open_regular(path).close()  # OpenCV would wait for a pipe's writer
    except OSError as error:
        reason = f"{path}: cannot be read ({(error.strerror or str(error)).lower()})"
        return iter([FileProblem(str(path), reason, True)])
    capture = _open_capture(str(path))
    if not capture.isOpened():
        reason = f"{path}: cannot be opened as a video (damaged, or a codec that this OpenCV lacks)"
        return iter([FileProblem(str(path), reason, True)])
    return iterate_ahead(_video_frames(str(path), capture, vid_stride, max_frames), ahead)


def _open_capture(source: str | int) -> cv2.VideoCapture:
    """Opens a capture without the decoders' messages. The caller must check that it is open."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # read once, when OpenCV first opens a video
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        return cv2.VideoCapture(source)
    finally:
        cv2.utils.logging.setLogLevel(level)


def _open_stream(source: str) -> cv2.VideoCapture:
    is_webcam = _is_webcam(source)
    capture = _open_capture(int(source) if is_webcam else source)
    if not capture.isOpened():
        raise UserError(
            f"webcam {source}: not found, or in use" if is_webcam else f"{_shown(source)}: cannot be opened"
        )
    return capture


def _fps(capture: cv2.VideoCapture) -> float:
    fps = capture.get(cv2.CAP_PROP_FPS)
    return fps if math.isfinite(fps) and 0 < fps <= 1000 else UNKNOWN_FPS


def _length(capture: cv2.VideoCapture) -> int | None:
    count = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return int(count) if math.isfinite(count) and count > 0 else None


def _to_rgb(frame: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(frame, cv2.COLOR_GRAY2RGB if frame.ndim == 2 else cv2.COLOR_BGR2RGB)


def _video_frames(path: str, capture: cv2.VideoCapture, stride: int, max_frames: int) -> Iterator[Frame | FileProblem]:
    """Yields every ``stride``-th frame; the others are not decoded. A video that ends early is a problem."""
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
        yield FileProblem(path, f"{path}: ends after {index} of {total} frames (damaged?)", False)


def _stream_frames(
    source: str, capture: cv2.VideoCapture, stride: int, max_frames: int, ahead: Callable[[], int]
) -> Iterator[Frame | FileProblem]:
    """Yields all frames of a URL of known length, which is a video, or the newest ones of a live stream."""
    if _length(capture) is not None:
        is_empty = True
        for item in iterate_ahead(_video_frames(source, capture, stride, max_frames), ahead):
            is_empty = is_empty and not isinstance(item, Frame)
            yield item
        if is_empty:
            raise UserError(f"{source}: no frame can be read; download the video and give its path")
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
            yield Frame(source, index, _to_rgb(frame), fps, True, None, is_live=True)
            taken, due = taken + 1, index + stride
    except TimeoutError:
        raise UserError(f"{source}: no frame for {STREAM_TIMEOUT_S:.0f} s") from None
    finally:
        stream.close()
    if not taken:
        raise UserError(f"{source}: ended before its first frame")
