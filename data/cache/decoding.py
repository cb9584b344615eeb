"""Decodes images for the caches in threads, names the files of caches, removes old ones, and checks free space."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from data.image_io.decode import read_source
from data.index.index import DatasetIndex, digest_of
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.logger import get_logger, progress
from utils.machine.resources import USABLE_DISK_FRACTION
from utils.machine.threads import map_ahead
from utils.strings import format_bytes

T = TypeVar("T")
_SUFFIXES = (".lmdb", ".complete", ".tree", ".pixels")  # earlier versions wrote ".tree"
_VERSION = 5  # part of each file name; increase it when the layout of a file or `read_source` changes


class ImageCache(Protocol):
    """Decoded source images by number, regardless of storage."""

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns an image, (h, w, C), read-only. Raises UserError for damage."""


class Decoding(NamedTuple):
    """Decodes the images of a cache, in threads."""

    threads: int = 4
    show_progress: bool = False
    reduces: bool = True  # whether images are reduced as for training; see `read_source`

    def read(self, index: DatasetIndex, i: int, source_hw: np.ndarray) -> np.ndarray:
        """Decodes image i to (h, w, C), with its size in ``source_hw`` (N, 2). Raises UserError."""
        return read_source(index.path(i), index.image_hw[i], source_hw[i], index.pixels, reduces=self.reduces)

    def map(self, function: Callable[[int], T], images: Sequence[int], title: str) -> Iterable[T]:
        """Yields the results of ``function`` for ``images``, in order, with a progress bar called ``title``."""
        done = map_ahead(function, images, threads=self.threads)
        return progress(done, desc=title, total=len(images), enabled=self.show_progress)


def check_space(size: int, place: Path | str, free: int, flag: str, remedy: str) -> None:
    """Raises UserError unless ``size`` bytes fit into ``free`` bytes with some to spare."""
    if size > USABLE_DISK_FRACTION * free:
        shortage = f"needs {format_bytes(size)} in {place}, but only {format_bytes(free)} is free"
        raise UserError(f"{flag}: {shortage}; {remedy}")


class CacheName(NamedTuple):
    """The name of a cache file, which identifies the data set, the version of its images, and the selected images.

    Labels and class names are not part of it, so that editing them causes no decoding. With a size and a suffix it is,
    for example, ``lockstep-1000-train-SOURCE-CONTENT-SELECTION-IMAGES-640.pixels``.
    """

    source: str  # identifies user, data set and split, whatever the content
    content: str  # digest of the image files of the split, their pixel format, and the version of this code
    selection: str  # digest of the settings that select images
    images: str  # digest of the selected images

    @classmethod
    def of(cls, index: DatasetIndex) -> CacheName:
        """Names the caches of the images of ``index``."""
        return cls(
            source=f"lockstep-{os.getuid()}-{index.source}",
            content=digest_of(_VERSION, index.image_files, index.pixels.content())[:16],
            selection=digest_of(index.selection)[:16],
            images=index.image_digest()[:16],
        )

    def path(self, folder: Path, imgsz: int, suffix: str) -> Path:
        """Returns the path of the file with images of size ``imgsz``, 0 for full size. ``suffix``: ends its name.

        A file of the same images that was written with other settings is reused.
        """
        path = folder / f"{'-'.join(self)}-{imgsz}{suffix}"
        same_images = f"{glob.escape(self.source)}-{self.content}-*-{self.images}-{imgsz}{suffix}"
        return path if path.exists() else next(folder.glob(same_images), path)

    def replaces(self, name: str) -> bool:
        """Returns whether the file ``name``, of the same source, is out of date: its images have changed, or the same
        settings now select others. Caches for other settings are kept, because runs may alternate between settings."""
        if f"-{self.content}-" not in name:
            return True
        return f"-{self.selection}-" in name and f"-{self.images}-" not in name

    def remove_older(self, folder: Path) -> None:
        """Removes the caches that this one replaces, except caches that are being filled.

        A process that reads a removed cache keeps its mapping until it ends.
        """
        for path in folder.glob(f"{glob.escape(self.source)}-*"):
            if path.suffix in _SUFFIXES and self.replaces(path.name):
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
