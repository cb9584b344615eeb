"""Files of raw decoded pixels, mapped by all processes that read them: in memory (ram.py) or on the disk
(full_size.py). They have no header, because the position of each image follows from the sizes; after the pixels, a file
on the disk ends with its own name."""

from __future__ import annotations

import errno
import mmap
import os
from functools import partial
from pathlib import Path

import numpy as np

from data.cache.decoding import Decoding
from data.index.index import DatasetIndex
from utils.errors import UserError, os_reason
from utils.files.safe_io import open_descriptor
from utils.logger import get_logger
from utils.pixels import PixelFormat
from utils.strings import counted, format_bytes


class MappedImages:
    """Source images by number, as read-only views of a mapped file. Unpickling maps the file again."""

    def __init__(self, path: Path, source_hw: np.ndarray, pixels: PixelFormat, *, end: bytes = b"") -> None:
        """Maps ``path``, with images of the sizes ``source_hw`` (N, 2) one after another, and then the bytes ``end``.

        Raises OSError if the file cannot be mapped, or has another size or end.
        """
        self.path = path
        self.source_hw = source_hw
        self.pixels = pixels
        self.end = end
        self._offsets = pixel_offsets(source_hw, pixels)
        size = int(self._offsets[-1]) + len(end)
        descriptor, status = open_descriptor(path)
        try:
            if status.st_size != size:
                raise OSError(errno.EINVAL, f"has {status.st_size:,} bytes, expected {size:,}", str(path))
            if os.pread(descriptor, len(end), size - len(end)) != end:
                raise OSError(errno.EINVAL, "was not completed under this name", str(path))
            self._mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns an image, (h, w, C), read-only."""
        height, width = self.source_hw[index].tolist()
        shape = (height, width, self.pixels.channels)
        # Slices and views of a larger array would take three times as long, for each source image of each sample.
        return np.ndarray(shape, self.pixels.dtype, buffer=self._mapping, offset=self._offsets[index])

    def __reduce__(self) -> tuple:
        return partial(MappedImages, end=self.end), (self.path, self.source_hw, self.pixels)


def pixel_offsets(source_hw: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    """Returns the byte at which each image begins, and the total size: int64 (N + 1,)."""
    return np.concatenate([[0], np.cumsum(source_hw.astype(np.int64).prod(axis=1) * pixels.nbytes)])


def decode_into(descriptor: int, index: DatasetIndex, source_hw: np.ndarray, decoding: Decoding, *, title: str) -> None:
    """Decodes all images of ``index`` into an open file. ``title``: start of the line in the log, and of messages.

    Decodes no more images at once than there is memory for. Raises UserError if there is not enough space, or an image
    cannot be decoded.
    """
    offsets = pixel_offsets(source_hw, index.pixels)
    size = int(offsets[-1])
    get_logger().info("%s: %s, %s", title, counted(len(index), "image"), format_bytes(size))
    try:
        if hasattr(os, "posix_fallocate"):  # on a full disk, writing to a mapped file would raise SIGBUS
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    except OSError as error:
        reason = os_reason(error)
        raise UserError(f"{title}: {format_bytes(size)} cannot be allocated ({reason})") from None
    pixels = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)

    def decode(i: int) -> None:
        pixels[offsets[i] : offsets[i + 1]] = decoding.read(index, i, source_hw).reshape(-1).view(np.uint8)

    limited = decoding.within_memory(source_hw, index.pixels)  # now that memory for the cache itself is allocated
    limited.for_each(range(len(index)), decode, title="caching images")
