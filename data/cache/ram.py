"""``--cache ram``: decoded source images in one file per node in /dev/shm, mapped by every rank and worker.

The file holds raw pixels without a header, whose offsets follow from the image sizes. The first process of the node
makes it, keeps it locked, and removes it at its end; what a killed run has left is removed by the next one.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np

from data.cache.decoding import Decoding
from data.image_io.decode import reduced_sizes
from data.index.index import DatasetIndex
from utils.config.pixels import PixelFormat
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.folders import USABLE_FRACTION
from utils.files.safe_io import flock, is_still_named, open_descriptor, remove_abandoned
from utils.logger import get_logger
from utils.machine.limits import DISK_FULL
from utils.machine.resources import available_memory
from utils.strings import counted, format_bytes

_PREFIX, _SUFFIX = f"lockstep-{os.getuid()}-", ".ram"  # of the names of files in memory


class RamCache:
    """Source images by number, as read-only views of a mapped file, which a process that unpickles it maps again."""

    def __init__(self, path: Path, source_hw: np.ndarray, pixels: PixelFormat) -> None:
        """Maps ``path``, with images of the sizes ``source_hw`` (N, 2) one after the other. Raises OSError, also if the
        file has another size."""
        self.path = path
        self.source_hw, self.pixels = source_hw, pixels
        self._offsets = pixel_offsets(source_hw, pixels)
        handle, status = open_descriptor(path)
        try:
            if status.st_size != self._offsets[-1]:
                raise OSError(errno.EINVAL, "not written by this program", str(path))
            self._pixels = np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(handle)

    def __len__(self) -> int:
        return len(self.source_hw)

    def __getitem__(self, index: int) -> np.ndarray:
        """(h, w, C), read-only."""
        stored = self._pixels[self._offsets[index] : self._offsets[index + 1]]
        return stored.view(self.pixels.dtype).reshape(*self.source_hw[index], self.pixels.channels)

    def __reduce__(self) -> tuple:
        return RamCache, (self.path, self.source_hw, self.pixels)


def pixel_offsets(source_hw: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(source_hw.astype(np.int64).prod(axis=1) * pixels.nbytes)])


def open_ram_cache(
    index: DatasetIndex, folder: Path, imgsz: int, decoding: Decoding, ctx: DistributedContext | None
) -> RamCache:
    """Fills a file in ``folder``, the node's memory, and opens it, see `open_image_cache`."""
    source_hw = reduced_sizes(index.image_hw, imgsz) if imgsz else index.image_hw.astype(np.int32)
    key = f"ram_cache/{ctx.node_rank}/{index.source}/{imgsz}" if ctx and ctx.store else ""
    if ctx is not None and not ctx.is_node_leader:
        return RamCache(Path(os.fsdecode(ctx.store.get(key))), source_hw, index.pixels)
    if not folder.is_dir():
        raise UserError(f"--cache ram: this system has no {folder}; use --cache disk")
    remove_abandoned(folder.glob(f"{_PREFIX}*{_SUFFIX}"))
    size, disk = int(pixel_offsets(source_hw, index.pixels)[-1]), shutil.disk_usage(folder)
    remedy = "use --cache disk or none"
    remedy += ", or make it larger (docker run --shm-size)" if size > disk.total else ""
    check_space(size, folder, min(disk.free, available_memory()), "--cache ram", remedy)
    while True:
        handle, name = tempfile.mkstemp(_SUFFIX, _PREFIX, folder)
        flock(handle, shared=True, patience_s=math.inf)
        if is_still_named(handle, path := Path(name)):
            break
        os.close(handle)  # another run has removed the file before it was locked
    try:
        fill(handle, index, source_hw, decoding, f"--cache ram: {folder}")
        cache = RamCache(path, source_hw, index.pixels)
    except BaseException:
        _remove(handle, path, os.getpid())
        raise
    weakref.finalize(cache, _remove, handle, path, os.getpid())
    if key:
        ctx.store.set(key, os.fsencode(path))
    return cache


def _remove(handle: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a forked worker
        path.unlink(missing_ok=True)
        os.close(handle)


def check_space(size: int, folder: Path, free: int, flag: str, remedy: str) -> None:
    if size > USABLE_FRACTION * free:
        need = f"needs {format_bytes(size)} in {folder}, but only {format_bytes(free)} is free"
        raise UserError(f"{flag}: {need}; {remedy}")


def fill(handle: int, index: DatasetIndex, source_hw: np.ndarray, decoding: Decoding, where: str) -> None:
    """Decodes all images into an open file."""
    offsets = pixel_offsets(source_hw, index.pixels)
    size = int(offsets[-1])
    get_logger().info("%s: %s, %s", where, counted(len(index), "image"), format_bytes(size))
    try:  # now: on a full disk, writing to a mapped file kills the process with SIGBUS
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.truncate(handle, size)
    except OSError as error:
        if error.errno in (*DISK_FULL, errno.EFBIG):
            raise UserError(f"{where}: the disk is full ({format_bytes(size)} needed)") from None
        raise
    pixels = np.frombuffer(mmap.mmap(handle, size), np.uint8)

    def decode(i: int) -> None:
        pixels[offsets[i] : offsets[i + 1]] = decoding.read(index, i, source_hw).reshape(-1).view(np.uint8)

    for _ in decoding.each(decode, range(len(index)), "caching images"):
        pass
