"""Shared by the image caches: decoding in threads, file names, checks of free space, and removal of old files."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data.image_io.decode import read_source
from data.index.index import DatasetIndex
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.logger import get_logger, progress
from utils.machine.resources import USABLE_DISK_FRACTION
from utils.machine.threads import map_ahead
from utils.strings import format_bytes

T = TypeVar("T")
_SUFFIXES = (".lmdb", ".complete", ".tree", ".pixels")  # earlier versions wrote ".tree"


class Decoding(NamedTuple):
    """How a cache decodes its images."""

    threads: int = 4
    show_progress: bool = False
    reduces: bool = True  # whether JPEGs may be decoded at a fraction of their size, as for training

    def read(self, index: DatasetIndex, i: int, source_hw: np.ndarray) -> np.ndarray:
        """Decodes image i to (h, w, C), with its size in ``source_hw`` (N, 2). Raises UserError."""
        return read_source(index.path(i), index.image_hw[i], source_hw[i], index.pixels, reduces=self.reduces)

    def map(self, function: Callable[[int], T], images: Sequence[int], title: str) -> Iterable[T]:
        """Yields the results of ``function`` for ``images``, in order, with a progress bar called ``title``."""
        done = map_ahead(function, images, threads=self.threads)
        return progress(done, desc=title, total=len(images), enabled=self.show_progress)


def check_space(size: int, place: Path | str, free: int, flag: str, remedy: str) -> None:
    """Raises UserError unless ``size`` bytes fit into ``free`` bytes, of which a part stays in reserve."""
    if size > USABLE_DISK_FRACTION * free:
        shortage = f"needs {format_bytes(size)} in {place}, but only {format_bytes(free)} is free"
        raise UserError(f"{flag}: {shortage}; {remedy}")


def cache_path(folder: Path, index: DatasetIndex, imgsz: int, kind: str) -> Path:
    """Returns the path of a cache. ``kind``: layout and suffix of the file."""
    return folder / f"{_name(index)}-{index.fingerprint[:32]}-{imgsz}-{kind}"


def _name(index: DatasetIndex) -> str:
    """Returns the prefix that the caches of all versions of a data set share."""
    return f"lockstep-{os.getuid()}-{index.source}"


def remove_older(folder: Path, index: DatasetIndex) -> None:
    """Removes the caches of earlier versions of the data set, except one that is being filled.

    A process that reads a removed cache keeps its mapping until it ends.
    """
    for path in folder.glob(f"{glob.escape(_name(index))}-*"):
        if index.fingerprint[:32] not in path.name and path.suffix in _SUFFIXES:
            with contextlib.suppress(OSError), FileLock(path.with_suffix(".lock")) as lock:
                if not lock.acquire():
                    path.unlink()
                    lock.path.unlink()


def discard(flag: str, reason: Exception, *files: Path) -> None:
    """Removes the ``files`` of a cache, the last of which cannot be used, and logs a warning.

    Raises UserError if a file cannot be removed.
    """
    cause = reason.strerror if isinstance(reason, OSError) else reason
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: {file}: cannot be used ({cause}), nor removed ({error.strerror})") from None
    get_logger().warning("%s: %s cannot be used (%s); it is created again", flag, files[-1], cause)
