"""Shared by all caches: decoding in threads, and the check that the images fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from data.image_io.decode import read_source
from data.index.index import DatasetIndex
from utils.errors import UserError
from utils.logger import progress
from utils.machine.resources import USABLE_DISK_FRACTION
from utils.machine.threads import map_ahead
from utils.strings import format_bytes

T = TypeVar("T")


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


def check_space(title: str, size: int, *, free: int, place: Path | str, remedy: str) -> None:
    """Raises UserError unless ``size`` bytes fit into the ``free`` bytes of ``place`` with some to spare."""
    if size > USABLE_DISK_FRACTION * free:
        shortage = f"needs {format_bytes(size)} in {place}, but only {format_bytes(free)} is free"
        raise UserError(f"{title}: {shortage}; {remedy}")
