"""Progress of a scan, saved in a file beside the index caches, so that the next run continues an interrupted scan.

The file is replaced every few seconds, in a long scan less often, and on an interruption. A scan of a few seconds
writes nothing, and a finished scan removes it.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.labels.findings import Finding
from utils.files.array_file import CacheError, open_arrays, write_arrays

SAVE_EVERY_S = 5.0
_SAVE_EVERY_PART = 0.1  # of the time since the scan began: every file has all chunks


class LocatedFinding(NamedTuple):
    """A finding and its position in the data set, by which the report is sorted."""

    image: int
    line: int  # -1: the image or the label file itself
    finding: Finding
    class_id: int = -1  # of a box whose geometry is the problem, and
    xyxy_px: tuple[float, ...] = ()  # its corners as labeled, original pixels; empty: there is no such box


class ScannedChunk(NamedTuple):
    """Sizes, labels and findings of n consecutive images."""

    first: int
    image_hw: np.ndarray  # int32 (n, 2); (0, 0) if the image is unreadable
    table: np.ndarray  # float64 (R, 9), see data.labels.clean
    found: list[LocatedFinding]
    hidden: int  # images whose damage only decoding showed
    largest: int  # sample of the 16-bit images; 0 without

    def __len__(self) -> int:
        return len(self.image_hw)


class PartialScan:
    """``chunks``: those that an interrupted scan saved in ``path``, then also those that are added. Saves nothing if
    ``path`` is None or cannot be written. ``size``: images of a chunk."""

    def __init__(self, path: Path | None, size: int) -> None:
        self.chunks: list[ScannedChunk] = []
        self._path, self._size = path, size
        self._began_at = self._saved_at = time.monotonic()
        with contextlib.suppress(OSError, CacheError):
            if path is not None:
                self._load(*open_arrays(path))

    def _load(self, meta: dict, arrays: dict[str, np.ndarray]) -> None:
        if meta.get("size") != self._size:
            return
        image, row = 0, 0
        for first, images, rows, found, hidden, largest in meta["chunks"]:
            image_hw, table = arrays["image_hw"][image : image + images], arrays["table"][row : row + rows]
            located = [LocatedFinding(i, n, Finding(*finding), c, tuple(xyxy)) for i, n, c, xyxy, *finding in found]
            self.chunks.append(ScannedChunk(first, image_hw, table, located, hidden, largest))
            image, row = image + images, row + rows

    def add(self, chunk: ScannedChunk) -> None:
        """Adds a chunk, and saves all if it is time."""
        self.chunks.append(chunk)
        now = time.monotonic()
        if now - self._saved_at > max(SAVE_EVERY_S, _SAVE_EVERY_PART * (now - self._began_at)):
            self.save()
            self._saved_at = time.monotonic()

    def save(self) -> None:
        if self._path is None or not self.chunks:
            return
        found = [[(p.image, p.line, p.class_id, p.xyxy_px, *p.finding) for p in c.found] for c in self.chunks]
        rows = [[c.first, len(c), len(c.table), f, c.hidden, c.largest] for c, f in zip(self.chunks, found)]
        arrays = {name: np.concatenate([getattr(c, name) for c in self.chunks]) for name in ("image_hw", "table")}
        with contextlib.suppress(OSError):  # an interrupted scan then starts from the beginning
            write_arrays(self._path, {"size": self._size, "chunks": rows}, arrays)

    def remove(self) -> None:
        """Removes the file; the scan is finished."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
