"""What image caches have in common: decoding in threads, names of files, space, and removing them."""

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
from utils.files.folders import USABLE_FRACTION
from utils.files.locks import FileLock
from utils.logger import get_logger, progress
from utils.machine.threads import map_ahead
from utils.strings import format_bytes

T = TypeVar("T")
_SUFFIXES = (".lmdb", ".complete", ".tree", ".pixels")  # ".tree" is of earlier versions


class Decoding(NamedTuple):
    """How a cache decodes its images."""

    threads: int = 4
    show_progress: bool = False
    reduces: bool = True  # whether JPEGs may be decoded at a fraction of their size, as for training

    def read(self, index: DatasetIndex, i: int, source_hw: np.ndarray) -> np.ndarray:
        """Image i, (h, w, C), of the size in ``source_hw`` (N, 2). Raises UserError."""
        return read_source(index.path(i), index.image_hw[i], source_hw[i], index.pixels, reduces=self.reduces)

    def each(self, function: Callable[[int], T], images: Sequence[int], title: str) -> Iterable[T]:
        """The results of ``function`` for ``images``, in order."""
        done = map_ahead(function, images, threads=self.threads)
        return progress(done, desc=title, total=len(images), enabled=self.show_progress)


def check_space(size: int, place: Path | str, free: int, flag: str, remedy: str) -> None:
    """Raises UserError unless ``size`` bytes fit into the ``free`` ones."""
    if size > USABLE_FRACTION * free:
        need = f"needs {format_bytes(size)} in {place}, but only {format_bytes(free)} is free"
        raise UserError(f"{flag}: {need}; {remedy}")


def cache_path(folder: Path, index: DatasetIndex, imgsz: int, kind: str) -> Path:
    """``kind``: layout and suffix."""
    return folder / f"{_name(index)}-{index.fingerprint[:32]}-{imgsz}-{kind}"


def _name(index: DatasetIndex) -> str:
    """The beginning of the names of all caches of a data set, also of earlier versions of it."""
    return f"lockstep-{os.getuid()}-{index.source}"


def remove_older(folder: Path, index: DatasetIndex) -> None:
    """Removes the caches of earlier versions of the data set, except one that is being filled. Processes that read one
    keep it until they end."""
    for path in folder.glob(f"{glob.escape(_name(index))}-*"):
        if index.fingerprint[:32] not in path.name and path.suffix in _SUFFIXES:
            with contextlib.suppress(OSError), FileLock(path.with_suffix(".lock")) as lock:
                if not lock.acquire():
                    path.unlink()
                    lock.path.unlink()


def discard(flag: str, reason: Exception, *files: Path) -> None:
    """Removes the ``files`` of a cache, the last of which cannot be used, with a warning. Raises UserError."""
    why = reason.strerror if isinstance(reason, OSError) else reason
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: {file}: cannot be used ({why}), nor removed ({error.strerror})") from None
    get_logger().warning("%s: %s cannot be used (%s); it is created again", flag, files[-1], why)
