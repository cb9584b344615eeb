"""What all image caches do alike: decoding the images of an index in threads, and naming the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data.image_io.decode import OnWarning, read_source
from data.index.index import DatasetIndex
from utils.logger import progress
from utils.machine.threads import map_ahead

T = TypeVar("T")


class Decoding(NamedTuple):
    """How a cache decodes its images."""

    threads: int = 4
    show_progress: bool = False
    on_warning: OnWarning | None = None  # called for damaged images, see `data.image_io.decode`

    def read(self, index: DatasetIndex, i: int, source_hw: np.ndarray) -> np.ndarray:
        """Image i, (h, w, C) of the size that ``source_hw`` (N, 2) says. Raises UserError as `read_source` does."""
        return read_source(index.path(i), index.image_hw[i], source_hw[i], self.on_warning, index.pixels)

    def each(self, function: Callable[[int], T], images: Sequence[int], title: str) -> Iterable[T]:
        """What ``function`` returns for each of ``images``, in order."""
        done = map_ahead(function, images, threads=self.threads)
        return progress(done, desc=title, total=len(images), enabled=self.show_progress)


def cache_path(folder: Path, index: DatasetIndex, imgsz: int, kind: str) -> Path:
    """The file of a cache. ``kind``: its layout and suffix. `utils.files.caches` knows these names."""
    return folder / f"lockstep-{os.getuid()}-{index.fingerprint[:32]}-{imgsz}-{kind}"
