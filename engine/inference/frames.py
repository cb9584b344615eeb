"""Frames of images, folders, globs, lists, videos, webcams and streams."""

from __future__ import annotations

import contextlib
import glob
import itertools
import math
import os
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.image_io.channels import to_format
from data.image_io.decode import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    MAX_IMAGE_BYTES,
    OnWarning,
    decode_image,
    image_suffixes,
    read_header,
    read_image,
    unread_image,
    unread_summary,
)
from utils.errors import UserError
from utils.files.safe_io import open_regular, read_text
from utils.files.url import NETWORK_ERRORS, is_http, open_url, read_url, url_path, without_login
from utils.logger import get_logger
from utils.machine.threads import iterate_ahead, map_ahead
from utils.pixels import RGB8, PixelFormat

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".ts", ".gif"})
STREAM_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt"})
UNKNOWN_FPS = 25.0
STREAM_TIMEOUT_S = 30.0
EARLY_END = 0.95  # fraction of the frames; containers only estimate their number


@dataclass(frozen=True)
class Frame:
    """One image of a source."""

    path: str  # file, URL without user and password, or number of a webcam
    image: np.ndarray  # uint8 (H, W, 3) RGB, or of another `PixelFormat`; upright, C-contiguous
    index: int = 0  # in its video or stream; of an image: among those of its folder in the source
    fps: float = 0.0  # of the video or stream
    is_video: bool = False
    total: int | None = 1  # frames of the video, None if unknown
    is_live: bool = False  # the newest frame of a webcam or stream


@dataclass(frozen=True)
class FileProblem:
    """A problem with a file of a source, reported between the frames."""

    path: str
    reason: str
    is_skipped: bool  # nothing of the file is used

    def log(self) -> None:
        get_logger().warning("%s%s", self.reason, "; skipped" if self.is_skipped else "")


class SourceOptions(NamedTuple):
    """How `open_source` reads a source."""

    vid_stride: int = 1  # read every n-th frame of videos and streams
    max_frames: int = 0  # of each video or stream; 0: all
    threads: int = 1  # that decode image files; a video is decoded in one
    ahead: Callable[[], int] = lambda: 0  # the most frames of files that are decoded in advance
    pixels: PixelFormat = RGB8  # of the frames
    by_number: bool = False  # frame2.jpg comes before frame10.jpg; else files of folders and globs come by name


def open_source(source: str, **settings: Any) -> Iterator[Frame | FileProblem]:
    """Yields the frames of ``source``, in order, and the problems of its files.

    Args:
        source: a file, a folder (its files, sorted), a glob (``**`` allowed), a .txt list of files (relative to the
            list's folder; each is read once), the number of a webcam, or the URL of an image, a video or a stream.
        settings: of `SourceOptions`.

    Raises UserError: at the call for a missing source or an unknown file type; at iteration for an unreadable file,
    which is skipped if the source has others.
    """
    source, options = str(source), SourceOptions(**settings)
    if is_http(source) and _names_image(source, image_suffixes(options.pixels)):
        return _url_frames(source, read_url(source, most=MAX_IMAGE_BYTES), options.pixels)
    if _is_stream(source):
        return _stream_frames(without_login(source), _open_stream(source), options)
    order = _by_number if options.by_number else None
    files, unread = _list_files(source, image_suffixes(options.pixels), order)
    if unread:
        get_logger().warning("%s: %s", source, unread_summary(unread))
    return _file_frames(files, source, options)


def check_source(source: str) -> None:
    """Raises UserError for files that `open_source` refuses for any pixels. Webcams and streams are not opened."""
    source_files(source)


def source_files(source: str) -> list[Path]:
    """The files that `open_source` reads, for any pixels; none of a webcam or a stream. Raises UserError."""
    return [] if _is_stream(source) else _list_files(source, IMAGE_SUFFIXES | {ARRAY_SUFFIX})[0]


def _is_stream(source: str) -> bool:
    scheme, separator, _ = source.partition("://")
    return _is_webcam(source) or (bool(separator) and scheme.lower() in STREAM_SCHEMES)


def _is_webcam(source: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,9}", source))


def _names_image(url: str, suffixes: frozenset[str]) -> bool:
    """Whether an address is that of an image: by its suffix, whatever follows it (``?size=large``), or without one, by
    what the server says. OpenCV would take it for a video of one frame."""
    suffix = os.path.splitext(url_path(url))[1].lower()
    if suffix:
        return suffix in suffixes
    with contextlib.suppress(*NETWORK_ERRORS, ValueError), open_url(url) as response:
        return response.headers.get_content_maintype() == "image"
    return False  # OpenCV says what is wrong


def _by_number(path: Path) -> list[tuple[str, int]]:
    """Returns a key for sorting: the text before each number of the path, and the number."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(text, int(number)) for text, number in zip(parts[::2], [*parts[1::2], "0"])]


def _list_files(
    source: str, image_suffixes: frozenset[str], order: Callable[[Path], Any] | None = None
) -> tuple[list[Path], list[str]]:
    """The images and videos that ``source`` names, at least one; and other images, as `unread_summary` takes them.
    ``order``: key by which those of folders and globs are sorted; None: by name."""
    if not source.strip():
        raise UserError("--source: is empty; name an image, folder, glob, video, list, webcam or URL")
    path, suffixes = Path(os.path.expanduser(source)), image_suffixes | VIDEO_SUFFIXES
    if path.is_file():
        return _read_list(path, suffixes) if path.suffix.lower() == ".txt" else [_checked(path, source, suffixes)], []
    if path.is_dir():
        found = path.iterdir()
        nothing = f"no image or video in this folder (use a glob for its subfolders: {source}/**/*)"
    elif any(sign in source for sign in "*?["):
        found, nothing = _matches(path), "the pattern matches no image or video"
    else:
        expected = "a source is an image, folder, glob, video, list, webcam or URL"
        raise UserError(f"{source}: no such file or folder; {expected}")
    files, unread = [], []
    for path in sorted((path for path in found if not path.is_dir()), key=order):
        if path.suffix.lower() in suffixes:
            files.append(path)  # a broken link is reported later, like any file that cannot be read
        elif what := unread_image(path):
            unread.append(f"{path}: {what}")
    if not files:
        raise UserError(f"{source}: {nothing}" + (f"; {unread_summary(unread)}" if unread else ""))
    return files, unread


def _matches(pattern: Path) -> list[Path]:
    """The files that a glob matches. Brackets may be those of names, as in ``videos [2024]/*.mp4``: the first folders
    that exist as written are no pattern, and if nothing matches, no bracket is."""
    folder = next(path for path in pattern.parents if path.is_dir())
    rest = str(pattern.relative_to(folder))
    for each in (rest, rest.replace("[", "[[]")):
        if found := glob.glob(os.path.join(glob.escape(str(folder)), each), recursive=True):
            return list(map(Path, found))
    return []


def _read_list(path: Path, suffixes: frozenset[str]) -> list[Path]:
    files: dict[Path, None] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if name := line.strip():
            file = path.parent / os.path.expanduser(name)
            if not file.is_file():
                raise UserError(f"{path}:{number}: {name}: no such file")
            files[_checked(file, f"{path}:{number}: {name}", suffixes)] = None
    if not files:
        raise UserError(f"{path}: the list names no file")
    return list(files)


def _checked(path: Path, named: str, suffixes: frozenset[str]) -> Path:
    """``path``. Raises UserError, which begins with ``named``, unless it has one of the ``suffixes``."""
    if path.suffix.lower() not in suffixes:
        what = f"'{path.suffix}' is not the suffix of an image or a video"
        raise UserError(f"{named}: {unread_image(path) or what}")
    return path


def _file_frames(files: Sequence[Path], source: str, options: SourceOptions) -> Iterator[Frame | FileProblem]:
    usable, read = 0, partial(_read_image, pixels=options.pixels)
    numbered = list(zip(files, _numbers_in_folders(files)))
    for path, found in zip(files, map_ahead(read, numbered, threads=options.threads, ahead=options.ahead)):
        for item in _read_video(path, options) if found is None else found:
            if isinstance(item, Frame):
                usable += 1
            elif item.is_skipped and len(files) == 1:
                raise UserError(item.reason)
            yield item
    if not usable:
        raise UserError(f"{source}: none of its {len(files)} files can be read")


def _numbers_in_folders(files: Sequence[Path]) -> Iterator[int]:
    """Yields the position of each file, from 0, among the images of its folder."""
    counts = Counter[Path]()
    for path in files:
        yield counts[path.parent]
        if path.suffix.lower() not in VIDEO_SUFFIXES:
            counts[path.parent] += 1


def _read_image(file: tuple[Path, int], pixels: PixelFormat) -> list[Frame | FileProblem] | None:
    """Reads an image, given with its number. Returns None for a video, which is opened only when the files before it
    are finished."""
    path, number = file
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return None
    found: list[Frame | FileProblem] = []
    try:
        found.append(Frame(str(path), read_image(path, _noting_damage(found), pixels), number))
    except UserError as error:
        found.append(FileProblem(str(path), str(error), True))
    return found


def _noting_damage(problems: list[Frame | FileProblem]) -> OnWarning:
    def on_warning(name: str, warning: str) -> None:
        problems.append(FileProblem(name, f"{name}: is damaged ({warning}); it is used as decoded", False))

    return on_warning


def _url_frames(url: str, content: bytes, pixels: PixelFormat) -> Iterator[Frame | FileProblem]:
    """The image in ``content``, which was read from ``url``."""
    name = without_login(url)
    problems: list[Frame | FileProblem] = []
    image = decode_image(content, read_header(content, name), name, on_warning=_noting_damage(problems), pixels=pixels)
    yield from problems
    yield Frame(name, image)


def _read_video(path: Path, options: SourceOptions) -> Iterator[Frame | FileProblem]:
    try:
        open_regular(path).close()  # OpenCV would wait for a pipe's writer
    except OSError as error:
        reason = f"{path}: cannot be read ({(error.strerror or str(error)).lower()})"
        return iter([FileProblem(str(path), reason, True)])
    capture = _open_capture(str(path))
    if not capture.isOpened():
        reason = f"{path}: cannot be opened as a video (damaged, or a codec that this OpenCV lacks)"
        return iter([FileProblem(str(path), reason, True)])
    return iterate_ahead(_video_frames(str(path), capture, options), options.ahead)


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
        what = f"webcam {source}: not found, or in use" if is_webcam else f"{without_login(source)}: cannot be opened"
        raise UserError(what)
    return capture


def _fps(capture: cv2.VideoCapture) -> float:
    fps = capture.get(cv2.CAP_PROP_FPS)
    return fps if 0 < fps <= 1000 else UNKNOWN_FPS


def _length(capture: cv2.VideoCapture) -> int | None:
    count = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return int(count) if 0 < count < math.inf else None


def _video_frames(path: str, capture: cv2.VideoCapture, options: SourceOptions) -> Iterator[Frame | FileProblem]:
    """Yields every n-th frame; the others are not decoded. A video that ends early is a problem."""
    fps, total = _fps(capture), _length(capture)
    index = taken = 0
    try:
        while capture.grab():
            if index % options.vid_stride == 0:
                ok, frame = capture.retrieve()
                if not ok:
                    break
                yield Frame(path, to_format(frame, path, options.pixels), index, fps, True, total)
                taken += 1
                if taken == options.max_frames:
                    return
            index += 1
    finally:
        capture.release()
    if total is not None and index < EARLY_END * total:
        yield FileProblem(path, f"{path}: ends after {index} of {total} frames (damaged?)", False)


def _stream_frames(source: str, capture: cv2.VideoCapture, options: SourceOptions) -> Iterator[Frame | FileProblem]:
    """Yields all frames of a URL of known length, which is a video, or the newest ones of a live stream."""
    if _length(capture) is not None:
        is_empty = True
        for item in iterate_ahead(_video_frames(source, capture, options), options.ahead):
            is_empty = is_empty and not isinstance(item, Frame)
            yield item
        if is_empty:
            raise UserError(f"{source}: no frame can be read; download the video and give its path")
        return
    fps, taken, due = _fps(capture), 0, 0
    with contextlib.closing(newest_frames(capture, source)) as frames:
        for index, frame in frames:
            if index >= due:
                yield Frame(source, to_format(frame, source, options.pixels), index, fps, True, None, is_live=True)
                taken, due = taken + 1, index + options.vid_stride
                if taken == options.max_frames:
                    return
    if not taken:
        raise UserError(f"{source}: ended before its first frame")


def newest_frames(capture: cv2.VideoCapture, source: str) -> Iterator[tuple[int, np.ndarray]]:
    """The numbers, from 0, and BGR images of the frames of a live stream; those that a slow reader cannot take are
    skipped. Releases ``capture``. Raises UserError if none comes for `STREAM_TIMEOUT_S`."""
    waiting: queue.SimpleQueue[tuple[int, np.ndarray] | None] = queue.SimpleQueue()
    is_closed = threading.Event()

    def read() -> None:
        for number in itertools.count():
            ok, frame = capture.read()
            if ok:
                with contextlib.suppress(queue.Empty):
                    waiting.get_nowait()  # an older frame
            waiting.put((number, frame) if ok else None)
            if not ok or is_closed.is_set():
                return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while (item := waiting.get(timeout=STREAM_TIMEOUT_S)) is not None:
            yield item
    except queue.Empty:
        raise UserError(f"{source}: no frame for {STREAM_TIMEOUT_S:.0f} s") from None
    finally:
        is_closed.set()
        thread.join(timeout=1)
        if not thread.is_alive():  # a blocked read still uses the capture; the thread ends with the process
            capture.release()
