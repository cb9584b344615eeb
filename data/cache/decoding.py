"""Decodes images in threads, for all caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from data.images.reduce import read_source
from data.index.index import DatasetIndex
from utils.logger import progress
from utils.machine.resources import available_memory
from utils.machine.threads import map_ahead
from utils.pixels import PixelFormat


class Decoding(NamedTuple):
    """Decodes the images of a cache, in threads."""

    threads: int = 4
    show_progress: bool = False
    antialias: bool = True  # whether images are reduced as for training; see `read_source`

    def read(self, index: DatasetIndex, i: int, source_hw: np.ndarray) -> np.ndarray:
        """Decodes image i to (h, w, C), with its size in ``source_hw`` (N, 2). Raises UserError."""
        return read_source(index.path(i), index.image_hw[i], source_hw[i], index.pixels, antialias=self.antialias)

    def within_memory(self, source_hw: np.ndarray, pixels: PixelFormat) -> Decoding:
        """Returns this with no more threads than can decode images of the sizes ``source_hw`` (N, 2) in a quarter of
        the available memory."""
        # A decoder holds up to three images: the file, the decoded pixels, and the converted pixels.
        decoder_bytes = 3 * int(source_hw.astype(np.int64).prod(axis=1).max()) * pixels.nbytes
        max_threads = int(available_memory() / 4 / decoder_bytes)
        return self._replace(threads=max(min(self.threads, max_threads), 1))

    def for_each(self, images: Sequence[int], function: Callable[[int], None], *, title: str) -> None:
        """Calls ``function`` for each of ``images``, with a progress bar called ``title``."""
        done = map_ahead(function, images, threads=self.threads)
        for _ in progress(done, desc=title, total=len(images), enabled=self.show_progress):
            pass
