"""A frame of a source, and a problem with one of its files."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from utils.logger import get_logger
from utils.pixels import RGB8, PixelFormat


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
    sequence: str = ""  # where objects are tracked: the video or stream, or an image's folder; "": images of a call


@dataclass(frozen=True)
class FileProblem:
    """A problem with a file of a source, reported between the frames."""

    path: str
    reason: str
    is_skipped: bool  # nothing of the file is used

    def log(self) -> None:
        get_logger().warning("%s%s", self.reason, "; skipped" if self.is_skipped else "")


FrameStream: TypeAlias = Generator[Frame | FileProblem, None, None]


class SourceOptions(NamedTuple):
    """Options of `engine.inference.sources.open_source.open_source`."""

    vid_stride: int = 1  # read every n-th frame of videos and streams
    max_frames: int = 0  # frames to read of each video or stream; 0: all
    threads: int = 1  # threads that decode image files; a video is decoded in one
    ahead: Callable[[], int] = lambda: 0  # returns how many frames of files may be decoded in advance
    pixels: PixelFormat = RGB8
    # For tracking: the images of a folder come one after another, and frame2.jpg before frame10.jpg. Otherwise the
    # files of folders and globs are sorted by name, and lists keep their order.
    in_sequences: bool = False
