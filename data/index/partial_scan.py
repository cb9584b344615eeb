"""Progress of a scan, saved in a file beside the index caches, so that the next run continues an interrupted scan.

Chunks are appended every few seconds and on an interruption. Each has a checksum, so an incomplete last chunk, after a
kill or on a full disk, is ignored. A scan of a few seconds writes nothing, and a finished scan removes the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from data.labels.clean import NUM_COLUMNS
from data.labels.findings import Finding
from utils.files.checked_open import open_own

SAVE_EVERY_S = 5.0
_HEADER = struct.Struct("<QIIII")  # first image, images, rows, bytes of JSON, and CRC-32 of the chunk's content
_MAX_BYTES = 1 << 32


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

    def __len__(self) -> int:
        return len(self.image_hw)


class PartialScan:
    """Saves chunks in ``path``. Saves nothing if ``path`` is None or cannot be written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._waiting: list[ScannedChunk] = []
        self._saved_at = time.monotonic()

    def __enter__(self) -> PartialScan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._save()
        elif self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def add(self, chunk: ScannedChunk) -> None:
        """Adds a chunk, and saves all that are not saved yet if the last time was `SAVE_EVERY_S` ago."""
        self._waiting.append(chunk)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save()

    def load(self, starts: range, size: int, count: int) -> list[ScannedChunk]:
        """The complete chunks that an earlier scan of ``count`` images saved. Chunks that do not begin at ``starts`` or
        do not have ``size`` images (fewer for the last one) are ignored."""
        if self._path is None:
            return []
        found: dict[int, ScannedChunk] = {}
        with contextlib.suppress(OSError), open(self._path, "rb", opener=open_own) as file:
            complete_to, length = 0, os.fstat(file.fileno()).st_size
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                first, images, rows, text_bytes, crc = _HEADER.unpack(header)
                end = file.tell() + (content_bytes := 8 * images + 8 * NUM_COLUMNS * rows + text_bytes)
                if not images or end > length or content_bytes > _MAX_BYTES:
                    break
                content = file.read(content_bytes)
                if zlib.crc32(content) != crc:
                    break
                if first in starts and images == min(size, count - first):
                    found[first] = _unpacked(first, images, rows, content)
                complete_to = end
            if complete_to < length:  # chunks appended after an incomplete one would not be found
                os.truncate(self._path, complete_to)
        return list(found.values())

    def _save(self) -> None:
        chunks, self._waiting = self._waiting, []
        self._saved_at = time.monotonic()
        if self._path is None or not chunks:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", opener=open_own) as file:
                file.write(b"".join(map(_packed, chunks)))
        except OSError:  # an interrupted scan then starts from the beginning
            self._path = None


def _packed(chunk: ScannedChunk) -> bytes:
    text = json.dumps([chunk.hidden, *([p.image, p.line, *p.finding] for p in chunk.found)]).encode()
    body = chunk.image_hw.astype("<i4").tobytes() + chunk.table.astype("<f8").tobytes() + text
    return _HEADER.pack(chunk.first, len(chunk), len(chunk.table), len(text), zlib.crc32(body)) + body


def _unpacked(first: int, images: int, rows: int, body: bytes) -> ScannedChunk:
    table_at, text_at = 8 * images, 8 * images + 8 * NUM_COLUMNS * rows
    hidden, *found = json.loads(body[text_at:])
    return ScannedChunk(
        first,
        np.frombuffer(body, "<i4", 2 * images).reshape(images, 2),
        np.frombuffer(body, "<f8", NUM_COLUMNS * rows, table_at).reshape(rows, NUM_COLUMNS),
        [LocatedFinding(image, line, Finding(*finding)) for image, line, *finding in found],
        hidden,
    )
