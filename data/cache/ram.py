"""``--cache ram``: holds decoded source images in memory, one copy per node, mapped by all its ranks and workers.

The memory is an anonymous file of raw pixels without a header; the offsets follow from the image sizes. The node's
first process creates it, and the others open that process's descriptor. It is freed when the last of them ends, in
whatever way, and the size of /dev/shm does not limit it.

Tiles of large images are cut from a file on the disk with the same layout.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import weakref
from pathlib import Path

import numpy as np

from data.cache.decoding import Decoding, cache_path, check_space, discard, remove_older
from data.image_io.decode import reduced_sizes
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.files.program_folders import cache_folder
from utils.files.safe_io import open_descriptor
from utils.files.temporary_folder import temporary_folder
from utils.logger import get_logger
from utils.machine.resources import available_memory
from utils.pixels import PixelFormat
from utils.strings import counted, format_bytes

_LAYOUT = 4  # part of the name of the file on the disk; increase it when the layout or `read_source` changes


class RamCache:
    """Source images by number, as read-only views of a mapped file. Unpickling maps the file again."""

    def __init__(self, path: Path, source_hw: np.ndarray, pixels: PixelFormat) -> None:
        """Maps ``path``, with images of the sizes ``source_hw`` (N, 2) one after another.

        Raises OSError, also if the file has another size.
        """
        self.path = path
        self.source_hw = source_hw
        self.pixels = pixels
        self._offsets = pixel_offsets(source_hw, pixels)
        handle, status = open_descriptor(path)
        try:
            if status.st_size != self._offsets[-1]:
                raise OSError(errno.EINVAL, "not written by this program", str(path))
            self._pixels = np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(handle)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns an image, (h, w, C), read-only."""
        stored = self._pixels[self._offsets[index] : self._offsets[index + 1]]
        return stored.view(self.pixels.dtype).reshape(*self.source_hw[index], self.pixels.channels)

    def __reduce__(self) -> tuple:
        return RamCache, (self.path, self.source_hw, self.pixels)


def pixel_offsets(source_hw: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    """Returns the byte at which each image begins, and the total size: int64 (N + 1,)."""
    return np.concatenate([[0], np.cumsum(source_hw.astype(np.int64).prod(axis=1) * pixels.nbytes)])


def open_ram_cache(index: DatasetIndex, imgsz: int, decoding: Decoding, ctx: DistributedContext | None) -> RamCache:
    """Decodes all images of ``index`` into the node's memory. Call it under `torch_distributed_zero_first`.

    Args:
        imgsz: longer side of the source images, pixels; 0 keeps the size of each file.
        ctx: None if this process is alone.

    Raises UserError: there is not enough memory, or an image cannot be decoded.
    """
    source_hw = reduced_sizes(index.image_hw, imgsz) if imgsz else index.image_hw.astype(np.int32)
    store = None if ctx is None else ctx.store
    node_rank = 0 if ctx is None else ctx.node_rank
    key = f"ram_cache/{node_rank}/{index.source}/{imgsz}"
    if ctx is not None and not ctx.is_node_leader:
        assert store is not None, "several processes of a node share a store"
        return RamCache(Path(os.fsdecode(store.get(key))), source_hw, index.pixels)
    if not hasattr(os, "memfd_create"):
        raise UserError("--cache ram: needs Linux; use --cache disk")
    size = int(pixel_offsets(source_hw, index.pixels)[-1])
    check_space(size, "memory", available_memory(), "--cache ram", "use --cache disk or none")
    handle = os.memfd_create("lockstep-images")
    try:
        _decode_into(handle, index, source_hw, decoding, title="--cache ram")
        cache = RamCache(Path(f"/proc/{os.getpid()}/fd/{handle}"), source_hw, index.pixels)
    except BaseException:
        os.close(handle)
        raise
    weakref.finalize(cache, os.close, handle).atexit = False
    if store is not None:
        store.set(key, str(cache.path))
    return cache


def open_full_cache(index: DatasetIndex, cache_dir: str, decoding: Decoding) -> RamCache:
    """Fills the node's file of images at full size if necessary, and maps it.

    The file gets its name once it is complete, and stays for later runs until the data set changes. Call this under
    `torch_distributed_zero_first`.
    """
    folder = cache_folder(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = cache_path(folder, index, 0, f"v{_LAYOUT}.pixels")
    source_hw = index.image_hw.astype(np.int32)
    remove_older(folder, index)
    with contextlib.suppress(OSError):  # without taking the lock, which a read-only folder cannot have
        return RamCache(path, source_hw, index.pixels)
    with FileLock(path.with_suffix(".lock")).wait(f"another run that fills {path}"):
        try:
            return RamCache(path, source_hw, index.pixels)
        except FileNotFoundError:
            pass
        except OSError as error:
            discard("tile", error, path)
        size = int(pixel_offsets(source_hw, index.pixels)[-1])
        check_space(size, folder, shutil.disk_usage(folder).free, "tile", "choose another --cache-dir")
        # A decoder holds up to three images: the file, its pixels, and their conversion.
        decoder_bytes = 3 * int(source_hw.astype(np.int64).prod(axis=1).max()) * index.pixels.nbytes
        max_threads = int(available_memory() / 4 / decoder_bytes)
        decoding = decoding._replace(threads=max(min(decoding.threads, max_threads), 1))
        with temporary_folder(path) as temporary, open(temporary / "pixels", "x+b") as file:
            _decode_into(file.fileno(), index, source_hw, decoding, title=f"tile: {path}")
            os.fsync(file.fileno())
            os.replace(temporary / "pixels", path)
    return RamCache(path, source_hw, index.pixels)


def _decode_into(handle: int, index: DatasetIndex, source_hw: np.ndarray, decoding: Decoding, *, title: str) -> None:
    """Decodes all images into an open file. ``title``: start of the line in the log."""
    offsets = pixel_offsets(source_hw, index.pixels)
    size = int(offsets[-1])
    get_logger().info("%s: %s, %s", title, counted(len(index), "image"), format_bytes(size))
    if hasattr(os, "posix_fallocate"):  # on a full disk, writing to a mapped file would kill the process with SIGBUS
        os.posix_fallocate(handle, 0, size)
    else:
        os.truncate(handle, size)
    pixels = np.frombuffer(mmap.mmap(handle, size), np.uint8)

    def decode(i: int) -> None:
        pixels[offsets[i] : offsets[i + 1]] = decoding.read(index, i, source_hw).reshape(-1).view(np.uint8)

    for _ in decoding.map(decode, range(len(index)), "caching images"):
        pass
