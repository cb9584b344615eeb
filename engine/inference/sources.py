"""The frames of a source: images, folders, globs, lists of files, videos, webcams, and URLs of any of these.

It needs no torch, so detect.py checks its source at once.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import math
import os
import queue
import re
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import cv2
import numpy as np

from data.images.decode import EncodedImage, decode_image, read_image, to_format
from data.images.kinds import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    MAX_IMAGE_BYTES,
    UNREAD_SUFFIXES,
    image_suffixes,
    unread_text,
)
from utils.address import as_address, full_address
from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.files.url import is_http, read_url, url_path
from utils.logger import get_logger
from utils.machine.threads import iterate_ahead, map_ahead
from utils.pixels import RGB8, PixelFormat

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".ts", ".gif"})
STREAM_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt"})
MAX_AHEAD_BYTES = 1 << 27
DEFAULT_FPS = 25.0  # for videos and streams that state no rate
MAX_FPS = 100.0  # of a variable frame rate; GIF's times are hundredths of a second
RATE_PACKETS = 300  # frames at the beginning of a video whose times show its frame rate
MAX_STEP_S = 3600.0  # a larger step of a container's clock, or one back, is a clock that was set
STREAM_TIMEOUT_S = 30.0  # a live source without a frame for so long is lost
RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before each attempt to open it again
MIN_READ_FRACTION = 0.95  # of the duration that the container states; a video that ends before that is damaged


@dataclass(frozen=True)
class Frame:
    """One image of a source."""

    path: str  # file, URL without user and password, or number of a webcam
    image: np.ndarray  # uint8 (H, W, 3) RGB, or of another `PixelFormat`; upright, C-contiguous
    index: int = 0  # position in its sequence
    time_s: float = 0.0  # seconds since the first frame: container timestamp, or time of arrival of a live stream
    end_s: float = 0.0  # when the next frame is shown, or the video ends; ``time_s`` in live streams
    fps: float = 0.0  # constant frame rate at which each frame of the video or stream can be shown in time
    is_video: bool = False
    duration_s: float | None = None  # of the video, as its container states it; None if unknown
    is_live: bool = False  # the newest frame of a webcam or stream
    sequence: str = ""  # where objects are tracked: the video or stream, or an image's folder; "": images of a call

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width of the image, pixels."""
        return self.image.shape[0], self.image.shape[1]


FrameStream: TypeAlias = Generator[Frame, None, None]


def log_skipped(reason: str, _number: int) -> None:
    get_logger().warning("%s; skipped", reason)


class ReadAhead:
    """Number of frames that may be read ahead of the model: at most ``count``, and `MAX_AHEAD_BYTES` together; none
    before the size of the first is known, and none of a live stream, whose newest frame is wanted."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._largest_bytes = 0
        self._is_live = False

    def __call__(self) -> int:
        if self._is_live or not self._largest_bytes:
            return 0
        return min(self._count, MAX_AHEAD_BYTES // self._largest_bytes)

    def note(self, frame: Frame) -> None:
        """Updates the largest size of a frame, and whether the source is live."""
        self._largest_bytes = max(self._largest_bytes, frame.image.nbytes)
        self._is_live = frame.is_live


class SourceOptions(NamedTuple):
    """Options of `open_source`."""

    vid_stride: int = 1  # read every n-th frame of videos and streams
    max_frames: int = 0  # frames to read of each video or stream; 0: all
    threads: int = 1  # threads that decode image files; a video is decoded in one
    ahead: Callable[[], int] = lambda: 0  # returns how many frames of files may be decoded in advance
    pixels: PixelFormat = RGB8
    is_tracked: bool = False  # objects are tracked, so that a single image is refused
    skip: Callable[[str, int], None] = log_skipped  # called with the reason why files are skipped, and their number


DEFAULT_OPTIONS = SourceOptions()


def is_webcam(source: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,9}", source))


def is_stream(source: str) -> bool:
    scheme, separator, _ = source.partition("://")
    return is_webcam(source) or (bool(separator) and scheme.lower() in STREAM_SCHEMES)


def source_files(source: str, suffixes: frozenset[str] = IMAGE_SUFFIXES | {ARRAY_SUFFIX}) -> list[Path]:
    """Lists the images, with ``suffixes``, and videos of a source: a file, a folder, a glob, or a .txt list, whose
    paths are relative to it. A list keeps its order; other files are sorted by folder and name, frame2.jpg before
    frame10.jpg. Webcams and URLs have no files. Raises UserError if there is no such file."""
    if is_stream(source):
        return []
    known = suffixes | VIDEO_SUFFIXES
    path = Path(os.path.expanduser(source))
    if source.strip() and path.is_file():
        files = [path]
        if path.suffix.lower() == ".txt":
            names = [name for name in map(str.strip, read_text(path).splitlines()) if name]
            addresses = [as_address(name) for name in names if is_stream(name) or "://" in name]
            if addresses:
                raise UserError(
                    f"{source}: names {addresses[0]}; a list names files: start detect.py once for each stream, with "
                    "its address as --source"
                )
            files = list(dict.fromkeys(path.parent / os.path.expanduser(name) for name in names))
        for file in files:
            where = source if file == path else f"{source}: {file}"
            if not file.is_file():
                raise UserError(f"{where}: no such file")
            if file.suffix.lower() not in known:
                raise UserError(f"{where}: '{file.suffix}' is not the suffix of an image or a video")
        if not files:
            raise UserError(f"{source}: the list names no file")
        return files
    is_folder = bool(source.strip()) and path.is_dir()
    files = [entry for entry in _matches(source) if entry.suffix.lower() in known]
    if not files:
        unread = _unread_files(source)
        if unread:
            raise UserError(f"{source}: no image or video; {unread[0][0]}")
        if is_folder:
            raise UserError(
                f"{source}: no image or video in this folder; its subfolders: --source {shlex.quote(f'{source}/**/*')}"
            )
        kinds = "an image, folder, glob, video, list, webcam or URL"
        raise UserError(f"{source or '--source'}: no such file or folder; a source is {kinds}")
    return sorted(files, key=lambda file: (file.parent, _by_number(file), file.name))


def _matches(source: str) -> list[Path]:
    """Lists the visible files of a folder or a glob."""
    path = Path(os.path.expanduser(source))
    entries: Iterable[Path]
    if source.strip() and path.is_dir():
        entries = path.iterdir()
    else:
        folder = next((parent for parent in path.parents if parent.is_dir()), path)  # may have brackets: "cam [1]"
        names = glob.glob(str(path.relative_to(folder)), root_dir=folder, recursive=True)
        entries = (folder / name for name in names)
    # A name such as macOS's ._x.jpg is no image.
    return [entry for entry in entries if not entry.name.startswith(".") and not entry.is_dir()]


def _unread_files(source: str) -> list[tuple[str, int]]:
    """Returns the kinds of images in a folder or a glob that are not read: a message about each, and their number."""
    files = defaultdict[str, list[str]](list)
    for path in _matches(source):
        if path.suffix.lower() in UNREAD_SUFFIXES - VIDEO_SUFFIXES:
            files[path.suffix.lower()].append(str(path))
    return [(f"{min(paths)}: {unread_text(suffix, len(paths))}", len(paths)) for suffix, paths in sorted(files.items())]


def open_source(source: str, options: SourceOptions = DEFAULT_OPTIONS) -> FrameStream:
    """Yields the frames of ``source``, see `source_files`, in order.

    Raises UserError: at the call for a source that does not exist or cannot be opened, or a single image if ``options``
    are for tracking; at iteration for an unreadable file, which is skipped if the source has others, and for a live
    source that is lost and does not come back. A video that ends early is a warning.
    """
    source = as_address(source)
    suffixes = image_suffixes(options.pixels)
    is_image = is_http(source) and os.path.splitext(url_path(source))[1].lower() in suffixes
    files = source_files(source, suffixes)
    if options.is_tracked and (is_image or (len(files) == 1 and not is_video(files[0]))):
        raise UserError(f"{source}: is one image; objects are tracked in videos, streams and folders of images")
    if files:
        return _file_frames(files, source, options)
    if is_image:  # OpenCV would read it as a video of one frame
        content = EncodedImage.from_data(read_url(source, max_bytes=MAX_IMAGE_BYTES), source)
        frame = Frame(source, decode_image(content, pixels=options.pixels), sequence=source)
        return (only for only in [frame])
    capture = _open_capture(source)
    if not capture.isOpened():
        raise UserError(f"webcam {source}: not found, or in use" if is_webcam(source) else f"{source}: no stream")
    if _duration_s(capture) is None:
        return _live_frames(source, capture, options)
    return _video_frames(source, capture, _fps(capture), options)


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_SUFFIXES


def sequence_of(path: Path) -> str:
    """Returns the sequence of a file: each video is a sequence, and so are the images of each folder."""
    return str(path) if is_video(path) else os.path.abspath(path.parent)


def _by_number(path: Path) -> list[tuple[str, int]]:
    """Returns a key for sorting: the text before each number of the file's name, and the number."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(text, int(number)) for text, number in zip(parts[::2], [*parts[1::2], "0"])]


def _file_frames(files: list[Path], source: str, options: SourceOptions) -> FrameStream:
    """Yields the frames of files."""
    counts = defaultdict[str, Iterator[int]](itertools.count)
    numbers = [next(counts[sequence_of(path)]) for path in files]

    def read(item: tuple[Path, int]) -> Frame | UserError | None:
        """Reads an image. Returns None for a video, which is opened when the files before it are finished."""
        path, number = item
        if is_video(path):
            return None
        try:
            return Frame(str(path), read_image(path, options.pixels), number, sequence=sequence_of(path))
        except UserError as error:
            return error

    for reason, number in _unread_files(source):
        options.skip(reason, number)
    is_empty = True
    images = map_ahead(read, zip(files, numbers), threads=options.threads, ahead=options.ahead)
    with contextlib.closing(images):
        for path, image in zip(files, images):
            try:
                if isinstance(image, UserError):
                    raise image
                if image is None:
                    yield from _video_file_frames(path, options)
                else:
                    yield image
                is_empty = False
            except UserError as error:
                if len(files) == 1:
                    raise
                options.skip(str(error), 1)
    if is_empty:
        raise UserError(f"{source}: none of its {len(files)} files can be read")


def _video_file_frames(path: Path, options: SourceOptions) -> FrameStream:
    """Yields the frames of a video file. Raises UserError if it cannot be opened."""
    capture = _open_capture(str(path)) if path.is_file() else None  # OpenCV would wait for a pipe's writer
    if capture is None or not capture.isOpened():
        raise UserError(f"{path}: cannot be opened as a video (missing, damaged, or a codec that this OpenCV lacks)")
    return _video_frames(str(path), capture, _shortest_rate(str(path), capture), options)


def _video_frames(name: str, capture: cv2.VideoCapture, fps: float, options: SourceOptions) -> FrameStream:
    """Yields every n-th frame, read ahead in a thread. Raises UserError for a video without a frame."""

    def read() -> FrameStream:
        duration_s = _duration_s(capture)
        newest: Frame | None = None  # it is yielded when its end is known
        taken = 0
        index = -1
        time_s = 0.0
        is_decoded = True
        try:
            for index, time_s in enumerate(_grabbed_times(capture, 1 / fps)):
                if index % options.vid_stride:
                    continue
                if newest is not None:
                    yield replace(newest, end_s=time_s)
                if taken and taken == options.max_frames:
                    return
                is_decoded, pixels = capture.retrieve()
                if not is_decoded:
                    newest = None
                    break
                newest = Frame(
                    name,
                    to_format(pixels, name, options.pixels),
                    index,
                    time_s=time_s,
                    fps=fps / options.vid_stride,
                    is_video=True,
                    duration_s=duration_s,
                    sequence=name,
                )
                taken += 1
            stated_frames = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        finally:
            capture.release()
        end_s = time_s + 1 / fps
        is_whole = is_decoded
        if duration_s is not None:
            if max(end_s / duration_s, (index + 1) / stated_frames) >= MIN_READ_FRACTION:
                end_s = max(end_s, duration_s)  # the last frame may be shown for long
            else:
                is_whole = False
        if newest is not None:
            yield replace(newest, end_s=end_s)
        if not is_whole or not taken:
            of_duration = f" of {duration_s:.2f}" if duration_s is not None else ""
            read_s = end_s if taken else 0.0
            reason = f"{name}: ends after {read_s:.2f}{of_duration} s (damaged, or OpenCV cannot read the rest)"
            if not taken:
                raise UserError(reason)
            get_logger().warning("%s", reason)

    with contextlib.closing(iterate_ahead(read(), options.ahead)) as items:
        yield from items


def _grabbed_times(capture: cv2.VideoCapture, interval_s: float) -> Iterator[float]:
    """Grabs the frames of a video, whose pixels `retrieve` decodes, and yields their times, seconds since the first.

    They are the container's. Where its clock does not advance, or was set, because recordings were joined, a frame
    follows the one before after ``interval_s``.
    """
    time_s = -interval_s
    start_s: float | None = None  # the container's clock at time 0
    while capture.grab():
        clock_s = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
        if start_s is None:
            start_s = clock_s
        if not 0 < clock_s - start_s - time_s <= MAX_STEP_S:
            start_s = clock_s - time_s - interval_s
        time_s = clock_s - start_s
        yield time_s


def _shortest_rate(path: str, capture: cv2.VideoCapture) -> float:
    """Returns the constant frame rate at which each frame of a video file can be shown in time: the rate that it
    states, or, if the frames at its beginning follow each other at another one, the highest of theirs."""
    fps = _fps(capture)
    # Encoded frames are not decoded, so that this takes milliseconds.
    packets = _open_capture(path, [cv2.CAP_PROP_FORMAT, -1])
    times_ms = {packets.get(cv2.CAP_PROP_POS_MSEC) for _ in range(RATE_PACKETS) if packets.grab()}
    packets.release()
    if len(times_ms) < 2:
        return fps
    step_s = float(np.percentile(np.diff(sorted(times_ms)), 5)) / 1000  # the very shortest are rounding errors
    return fps if 0.75 < fps * step_s < 1.5 else min(1 / step_s, MAX_FPS)


def _live_frames(name: str, capture: cv2.VideoCapture, options: SourceOptions) -> FrameStream:
    """Yields every n-th of the newest frames. A source that is lost is opened again, `RETRY_PAUSES_S`; a video of
    unknown length just ends."""
    is_file = "://" in name and os.path.splitext(url_path(name))[1].lower() in VIDEO_SUFFIXES
    fps = _fps(capture)
    index = -1
    due = 0  # index of the next frame to yield
    taken = 0
    first_at = 0.0
    retries = 0  # since the newest frame
    while True:
        first = index + 1
        with contextlib.closing(_newest_frames(capture)) as frames:
            for number, arrived_at, pixels in frames:
                if retries:
                    get_logger().info("%s: is back", name)
                    retries = 0
                index = first + number
                if index < due:
                    continue
                if not taken:
                    first_at = arrived_at
                yield Frame(
                    name,
                    to_format(pixels, name, options.pixels),
                    index,
                    time_s=arrived_at - first_at,
                    end_s=arrived_at - first_at,
                    fps=fps / options.vid_stride,
                    is_video=True,
                    is_live=True,
                    sequence=name,
                )
                due = index + options.vid_stride
                taken += 1
                if taken == options.max_frames:
                    return
        if index < 0:
            raise UserError(f"{name}: sends no frame")
        if is_file:
            return
        if retries == len(RETRY_PAUSES_S):
            raise UserError(f"{name}: was lost, and is not back after {retries} attempts to open it")
        if not retries:
            message = "%s: has ended, or sent no frame for %g s; trying to open it again, %d times"
            get_logger().warning(message, name, STREAM_TIMEOUT_S, len(RETRY_PAUSES_S))
        time.sleep(RETRY_PAUSES_S[retries])
        retries += 1
        capture = _open_capture(name)  # one that is not open has no frame


def _newest_frames(capture: cv2.VideoCapture) -> Generator[tuple[int, float, np.ndarray], None, None]:
    """Yields the numbers, from 0, times of arrival (`time.monotonic`) and BGR images of the frames of a live stream,
    which a thread reads: a slow reader gets the newest one. Ends if the stream ends, or sends none for
    `STREAM_TIMEOUT_S`."""
    # At most one frame, then the end.
    waiting: queue.SimpleQueue[tuple[int, float, np.ndarray] | None] = queue.SimpleQueue()
    is_closed = threading.Event()

    def read() -> None:
        with contextlib.suppress(cv2.error):
            for number in itertools.count():
                ok, frame = capture.read()
                if not ok or is_closed.is_set():
                    break
                with contextlib.suppress(queue.Empty):
                    waiting.get_nowait()  # an older frame
                waiting.put((number, time.monotonic(), frame))
        waiting.put(None)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        with contextlib.suppress(queue.Empty):
            while (item := waiting.get(timeout=STREAM_TIMEOUT_S)) is not None:
                yield item
    finally:
        is_closed.set()
        thread.join(timeout=1)
        if not thread.is_alive():  # a blocked read still uses the capture; the thread ends with the process
            capture.release()


def _open_capture(source: str, parameters: Sequence[int] = ()) -> cv2.VideoCapture:
    """Opens a webcam, a URL or a file without the decoders' messages. The caller must check that it is open.

    Only a stream is given as a URL: FFmpeg would also take a file name such as tcp:HOST for one.
    """
    place: str | int = full_address(source) if is_stream(source) else os.path.abspath(source)
    if is_webcam(source):
        place = int(source)
    with quiet_codecs():
        return cv2.VideoCapture(place, cv2.CAP_FFMPEG, parameters) if parameters else cv2.VideoCapture(place)


@contextlib.contextmanager
def quiet_codecs() -> Iterator[None]:
    """Opens a video in the block without the messages of OpenCV and its FFmpeg."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # read once, when OpenCV first opens a video
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)


def _fps(capture: cv2.VideoCapture) -> float:
    fps = capture.get(cv2.CAP_PROP_FPS)
    return fps if 0 < fps <= 1000 else DEFAULT_FPS


def _duration_s(capture: cv2.VideoCapture) -> float | None:
    """Returns the duration that a container states; None for a live stream. OpenCV multiplies it by the frame rate."""
    frames = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    fps = capture.get(cv2.CAP_PROP_FPS)
    return frames / fps if 0 < frames < math.inf and fps > 0 else None
