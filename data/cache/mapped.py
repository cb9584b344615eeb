"""Files of raw decoded pixels, mapped by all processes that read them, and ``--cache ram``, whose file is in memory.

A file has no header, because the position of each image follows from the sizes; after the pixels, a file on the disk
(data/cache/disk.py) ends with its own name.

``--cache ram`` holds one copy per node. The memory is an anonymous file: the node's first process creates it, and the
others open that process's descriptor. The memory is freed when the last of them ends, even if killed, and is not
limited by the size of /dev/shm.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.images.decode import read_source, reduced_sizes
from data.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.errors import UserError, os_reason
from utils.files.safe_io import open_descriptor
from utils.logger import get_logger, progress
from utils.machine.resources import available_memory, check_space
from utils.machine.threads import map_ahead
from utils.pixels import PixelFormat
from utils.strings import counted, format_bytes


class Decoding(NamedTuple):
    """Decodes the images of a cache, in threads."""

    threads: int = 4
    show_progress: bool = False
    antialias: bool = True  # whether images are reduced as for training; see `read_source`

    def read_all(
        self, index: DatasetIndex, images: Sequence[int], source_hw: np.ndarray
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Yields the numbers of ``images`` with the decoded images, (h, w, C) of the sizes ``source_hw`` (N, 2), in
        order. Raises UserError if one cannot be decoded.

        No more images at once than fit into a quarter of the memory that is left, now that a cache has its own. A
        decoder holds up to three images: the file, the decoded pixels, and the converted pixels.
        """
        decoder_bytes = 3 * int(source_hw.astype(np.int64).prod(axis=1).max()) * index.pixels.nbytes
        threads = max(min(self.threads, int(available_memory() / 4 / decoder_bytes)), 1)

        def read(i: int) -> tuple[int, np.ndarray]:
            path = index.path(i)
            return i, read_source(path, index.image_hw[i], source_hw[i], index.pixels, antialias=self.antialias)

        return map_ahead(read, images, threads=threads)


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

    Raises UserError if there is not enough space, or an image cannot be decoded.
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

    decoded = decoding.read_all(index, range(len(index)), source_hw)
    for i, image in progress(decoded, desc="caching images", total=len(index), enabled=decoding.show_progress):
        pixels[offsets[i] : offsets[i + 1]] = image.reshape(-1).view(np.uint8)


def open_ram_cache(ctx: DistributedContext, index: DatasetIndex, imgsz: int, decoding: Decoding) -> MappedImages:
    """Decodes all images of ``index`` into the node's memory. Call it under `torch_distributed_zero_first`.

    Args:
        imgsz: longer side of the source images, pixels; 0 keeps the size of each file.

    Raises UserError if there is not enough memory, or an image cannot be decoded.
    """
    source_hw = reduced_sizes(index.image_hw, imgsz) if imgsz else index.image_hw.astype(np.int32)
    key = f"ram_cache/{ctx.node_rank}/{index.cache_key}/{imgsz}"
    if ctx.store is not None and not ctx.is_node_leader:
        return MappedImages(Path(os.fsdecode(ctx.store.get(key))), source_hw, index.pixels)
    if not hasattr(os, "memfd_create"):
        raise UserError("--cache ram: needs Linux; use --cache disk")
    size = int(pixel_offsets(source_hw, index.pixels)[-1])
    check_space("--cache ram", size, free=available_memory(), place="memory", remedy="use --cache disk or none")
    descriptor = os.memfd_create("lockstep-images")
    try:
        decode_into(descriptor, index, source_hw, decoding, title="--cache ram")
        cache = MappedImages(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), source_hw, index.pixels)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(cache, os.close, descriptor).atexit = False
    if ctx.store is not None:
        ctx.store.set(key, str(cache.path))
    return cache
