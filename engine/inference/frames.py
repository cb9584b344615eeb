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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.image_io.channels import to_format
from data.image_io.decode import MAX_IMAGE_BYTES, OnWarning, decode_image, read_image
from data.image_io.file_kinds import ARRAY_SUFFIX, IMAGE_SUFFIXES, image_suffixes, unread_image, unread_summary
from data.image_io.header import read_header
from utils.errors import UserError
from utils.files.safe_io import open_regular, read_text
from utils.files.url import NETWORK_ERRORS, is_http, open_url, read_url, url_path, without_login
from utils.logger import get_logger
from utils.machine.threads import iterate_ahead, map_ahead
from utils.pixels import RGB8, PixelFormat

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".ts", ".gif"})
STREAM_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt"})
DEFAULT_FPS = 25.0  # for videos and streams that state no rate
STREAM_TIMEOUT_S = 30.0
MIN_READ_FRACTION = 0.95  # of the frames that a container states, which is an estimate; fewer: the video is damaged


@dataclass(frozen=True)
class Frame:
    """One image of a source."""

    path: str  # file, URL without user and password, or number of a webcam
    image: np.ndarray  # uint8 (H, W, 3) RGB, or of another `PixelFormat`; upright, C-contiguous
    index: int = 0  # position in its sequence
    fps: float = 0.0  # frame rate of the video or stream
    is_video: bool = False
    total: int | None = 1  # number of frames of the video, None if unknown
    is_live: bool = False  # the newest frame of a webcam or stream
    sequence: str = ""  # in which objects are tracked: the video or stream, or an image's folder; "": images of a call


@dataclass(frozen=True)
class FileProblem:
    """A problem with a file of a source, reported between the frames."""

    path: str
    reason: str
    is_skipped: bool  # nothing of the file is used

    def log(self) -> None:
        get_logger().warning("%s%s", self.reason, "; skipped" if self.is_skipped else "")


Items = Generator[Frame | FileProblem, None, None]


class SourceOptions(NamedTuple):
    """Options of `open_source`."""

    vid_stride: int = 1  # read every n-th frame of videos and streams
    max_frames: int = 0  # frames to read of each video or stream; 0: all
    threads: int = 1  # threads that decode image files; a video is decoded in one
    ahead: Callable[[], int] = lambda: 0  # returns how many frames of files may be decoded in advance
    pixels: PixelFormat = RGB8  # format of the frames
    # For tracking: the images of a folder come one after another, and frame2.jpg before frame10.jpg. Otherwise the
    # files of folders and globs come by name, and those of a list as listed.
    in_sequences: bool = False


def open_source(source: str, **settings: Any) -> Items:
    """Yields the frames of ``source``, in order, and the problems of its files.

    Args:
        source: a file, a folder (its files, sorted), a glob (``**`` allowed), a .txt list of files (relative to the
            list's folder; each is read once), the number of a webcam, or the URL of an image, a video or a stream.
        settings: of `SourceOptions`.

    Raises UserError: at the call for a missing source or an unknown file type; at iteration for an unreadable file,
    which is skipped if the source has others.
    """
    source = str(source)
    options = SourceOptions(**settings)
    if is_http(source) and _names_image(source, image_suffixes(options.pixels)):
        return _url_frames(source, read_url(source, most=MAX_IMAGE_BYTES), options.pixels)
    if _is_stream(source):
        return _stream_frames(without_login(source), _open_stream(source), options)
    order = _by_number if options.in_sequences else None
    files, unread = _list_files(source, image_suffixes(options.pixels), order)
    if options.in_sequences:
        files = _by_sequence(files)
    if unread:
        get_logger().warning("%s: %s", source, unread_summary(unread))
    return _file_frames(files, source, options)


def check_source(source: str) -> None:
    """Raises UserError for files that `open_source` refuses for any pixel format. Opens no webcams and streams."""
    source_files(source)


def source_files(source: str) -> list[Path]:
    """Lists the files that `open_source` reads, for any pixel format; none of a webcam or a stream. Raises
    UserError."""
    if _is_stream(source):
        return []
    files, _ = _list_files(source, IMAGE_SUFFIXES | {ARRAY_SUFFIX})
    return files


def _is_stream(source: str) -> bool:
    scheme, separator, _ = source.partition("://")
    return _is_webcam(source) or (bool(separator) and scheme.lower() in STREAM_SCHEMES)


def _is_webcam(source: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,9}", source))


def _names_image(url: str, suffixes: frozenset[str]) -> bool:
    """Returns whether an address is that of an image: by its suffix, whatever follows it (``?size=large``), or without
    a suffix by the server's content type. OpenCV would take it for a video of one frame."""
    suffix = os.path.splitext(url_path(url))[1].lower()
    if suffix:
        return suffix in suffixes
    with contextlib.suppress(*NETWORK_ERRORS, ValueError), open_url(url) as response:
        return response.headers.get_content_maintype() == "image"
    return False  # if it is neither, OpenCV reports it


def _by_number(path: Path) -> list[tuple[str, int]]:
    """Returns a key for sorting: the text before each number of the path, and the number."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(text, int(number)) for text, number in zip(parts[::2], [*parts[1::2], "0"])]


def _sequence_of(path: Path) -> str:
    """Returns the sequence that a file belongs to: a video is one, and so are the images of a folder."""
    return str(path) if path.suffix.lower() in VIDEO_SUFFIXES else os.path.abspath(path.parent)


def _by_sequence(files: Sequence[Path]) -> list[Path]:
    """Puts the files of each sequence together, at the place of the first of them."""
    groups: dict[str, list[Path]] = {}
    for path in files:
        groups.setdefault(_sequence_of(path), []).append(path)
    return [path for group in groups.values() for path in group]


def _list_files(
    source: str, image_suffixes: frozenset[str], order: Callable[[Path], Any] | None = None
) -> tuple[list[Path], list[str]]:
    """Lists the images and videos that ``source`` names, at least one; and other images, as `unread_summary` takes
    them. ``order``: key by which those of folders and globs are sorted; None: by name. Raises UserError."""
    if not source.strip():
        raise UserError("--source: is empty; name an image, folder, glob, video, list, webcam or URL")
    path = Path(os.path.expanduser(source))
    suffixes = image_suffixes | VIDEO_SUFFIXES
    try:
        is_file = path.is_file()
    except OSError as error:
        raise UserError(f"{source}: {(error.strerror or str(error)).lower()}") from None
    if is_file:
        if path.suffix.lower() == ".txt":
            return _read_list(path, suffixes), []
        _check_suffix(path, source, suffixes)
        return [path], []
    if path.is_dir():
        files, unread = _select_files(path.iterdir(), suffixes, order)
        reason = f"no image or video in this folder (use a glob for its subfolders: {source}/**/*)"
    elif any(sign in source for sign in "*?["):
        files, unread = _select_files(_matches(path), suffixes, order)
        reason = "the pattern matches no image or video"
    else:
        expected = "a source is an image, folder, glob, video, list, webcam or URL"
        raise UserError(f"{source}: no such file or folder; {expected}")
    if not files:
        if unread:
            reason += f"; {unread_summary(unread)}"
        raise UserError(f"{source}: {reason}")
    return files, unread


def _select_files(
    paths: Iterable[Path], suffixes: frozenset[str], order: Callable[[Path], Any] | None
) -> tuple[list[Path], list[str]]:
    """Selects the files with one of ``suffixes``, sorted; and other images, as `unread_summary` takes them."""
    files: list[Path] = []
    unread: list[str] = []
    for path in sorted((path for path in paths if not path.is_dir()), key=order):
        if path.suffix.lower() in suffixes:
            files.append(path)  # a broken link is reported later, like any file that cannot be read
            continue
        reason = unread_image(path)
        if reason:
            unread.append(f"{path}: {reason}")
    return files, unread


def _matches(pattern: Path) -> list[Path]:
    """Lists the files that a glob matches.

    Brackets may belong to names, as in ``videos [2024]/*.mp4``: leading folders that exist as written are taken
    literally, and so are all brackets if nothing matches.
    """
    folder = next(path for path in pattern.parents if path.is_dir())
    relative = str(pattern.relative_to(folder))
    for candidate in (relative, relative.replace("[", "[[]")):
        matches = glob.glob(os.path.join(glob.escape(str(folder)), candidate), recursive=True)
        if matches:
            return [Path(match) for match in matches]
    return []


def _read_list(path: Path, suffixes: frozenset[str]) -> list[Path]:
    """Reads a .txt list of files. Raises UserError, with the line."""
    files: dict[Path, None] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name = line.strip()
        if name:
            file = path.parent / os.path.expanduser(name)
            if not file.is_file():
                raise UserError(f"{path}:{number}: {name}: no such file")
            _check_suffix(file, f"{path}:{number}: {name}", suffixes)
            files[file] = None
    if not files:
        raise UserError(f"{path}: the list names no file")
    return list(files)


def _check_suffix(path: Path, location: str, suffixes: frozenset[str]) -> None:
    """Raises UserError, which begins with ``location``, unless ``path`` has one of the ``suffixes``."""
    if path.suffix.lower() not in suffixes:
        reason = unread_image(path) or f"'{path.suffix}' is not the suffix of an image or a video"
        raise UserError(f"{location}: {reason}")


def _file_frames(files: Sequence[Path], source: str, options: SourceOptions) -> Items:
    """Yields the frames of files, and their problems."""
    usable = 0
    read = partial(_read_image, pixels=options.pixels)
    contents = map_ahead(read, _placed(files), threads=options.threads, ahead=options.ahead)
    with contextlib.closing(contents):
        for path, content in zip(files, contents):
            items = _read_video(path, options) if content is None else _each(content)
            with contextlib.closing(items):
                for item in items:
                    if isinstance(item, Frame):
                        usable += 1
                    elif item.is_skipped and len(files) == 1:
                        raise UserError(item.reason)
                    yield item
    if not usable:
        raise UserError(f"{source}: none of its {len(files)} files can be read")


class PlacedFile(NamedTuple):
    """A file of a source."""

    path: Path
    sequence: str
    number: int  # of an image in its sequence, from 0


def _placed(files: Iterable[Path]) -> Iterator[PlacedFile]:
    """Yields files with their sequences, in which images are numbered from 0."""
    counts = Counter[str]()
    for path in files:
        sequence = _sequence_of(path)
        yield PlacedFile(path, sequence, counts[sequence])
        counts[sequence] += 1


def _read_image(file: PlacedFile, pixels: PixelFormat) -> list[Frame | FileProblem] | None:
    """Reads an image. Returns None for a video, which is opened only when the files before it are finished."""
    path = file.path
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return None
    content: list[Frame | FileProblem] = []
    try:
        image = read_image(path, _noting_damage(content), pixels)
        content.append(Frame(str(path), image, file.number, sequence=file.sequence))
    except UserError as error:
        content.append(FileProblem(str(path), str(error), True))
    return content


def _each(items: Iterable[Frame | FileProblem]) -> Items:
    yield from items


def _noting_damage(problems: list[Frame | FileProblem]) -> OnWarning:
    """Makes a callback that appends warnings of the decoder to ``problems``."""

    def on_warning(name: str, warning: str) -> None:
        problems.append(FileProblem(name, f"{name}: is damaged ({warning}); it is used as decoded", False))

    return on_warning


def _url_frames(url: str, content: bytes, pixels: PixelFormat) -> Items:
    """Yields the image in ``content``, which was read from ``url``."""
    name = without_login(url)
    problems: list[Frame | FileProblem] = []
    image = decode_image(content, read_header(content, name), name, on_warning=_noting_damage(problems), pixels=pixels)
    yield from problems
    yield Frame(name, image, sequence=name)


def _read_video(path: Path, options: SourceOptions) -> Items:
    """Opens a video. Returns its frames, or the problem why it cannot be read."""
    try:
        open_regular(path).close()  # OpenCV would wait for a pipe's writer
    except OSError as error:
        reason = f"{path}: cannot be read ({(error.strerror or str(error)).lower()})"
        return _each([FileProblem(str(path), reason, True)])
    capture = _open_capture(str(path))
    if not capture.isOpened():
        reason = f"{path}: cannot be opened as a video (damaged, or a codec that this OpenCV lacks)"
        return _each([FileProblem(str(path), reason, True)])
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
        if is_webcam:
            raise UserError(f"webcam {source}: not found, or in use")
        raise UserError(f"{without_login(source)}: cannot be opened")
    return capture


def _fps(capture: cv2.VideoCapture) -> float:
    fps = capture.get(cv2.CAP_PROP_FPS)
    return fps if 0 < fps <= 1000 else DEFAULT_FPS


def _length(capture: cv2.VideoCapture) -> int | None:
    count = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return int(count) if 0 < count < math.inf else None


def _video_frames(path: str, capture: cv2.VideoCapture, options: SourceOptions) -> Items:
    """Yields every n-th frame; the others are not decoded. A video that ends early is a problem."""
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
    if total is not None and index < MIN_READ_FRACTION * total:
        yield FileProblem(path, f"{path}: ends after {index} of {total} frames (damaged?)", False)


def _stream_frames(source: str, capture: cv2.VideoCapture, options: SourceOptions) -> Items:
    """Yields all frames of a URL of known length, which is a video, or the newest ones of a live stream."""
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
    and skips those before it. Releases ``capture`` at the end.

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
