"""``--cache ram``: decoded source images in one file per node in /dev/shm, mapped by every rank and worker.

The file holds raw pixels without a header, whose offsets follow from the image sizes, and a CRC-32 of each image. It
gets its final name when it is complete. Every process that maps it has a shared lock on it, and the last one removes
it. The file of a killed run is reused by the next run on the same data, or removed by any other run.

Tiles of large images (`data.index.tiles`) are views of such a file with images of full size, by default on the disk:
then it stays for later runs, until the data set changes.

Any user may create files in /dev/shm. So a file is only used if it belongs to this user, and a file that this run has
not written only if its checksums are right; else it is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import shutil
import tempfile
import weakref
import zlib
from pathlib import Path

import numpy as np

from data.cache.decoding import Decoding, cache_path, discard, remove_older
from data.image_io.decode import reduced_sizes
from data.index.index import DatasetIndex
from utils.config.pixels import PixelFormat
from utils.errors import UserError
from utils.files.array_file import CacheError
from utils.files.locks import FileLock
from utils.files.safe_io import flock, is_still_named, open_direct, remove_abandoned
from utils.logger import get_logger
from utils.machine.limits import DISK_FULL
from utils.machine.resources import available_memory
from utils.strings import counted

_SUFFIX = ".pixels"
_LAYOUT = 3  # part of the file name; increase it when the layout or `read_source` changes
_CRC = np.dtype("<u4")
_PATIENCE_S = 10.0  # to remove a large file, which its last process does under an exclusive lock, takes a while


class RamCache:
    """Source images by number, as read-only views of a mapped file. Picklable: another process maps the file again."""

    def __init__(self, path: Path, source_hw: np.ndarray, pixels: PixelFormat, stays: bool = False) -> None:
        """Maps ``path``, which contains images of the sizes ``source_hw`` (N, 2) one after the other. ``stays``: the
        last process does not remove it.

        Raises:
            FileNotFoundError: the file does not exist, or was removed while it was being opened.
            PermissionError: it is not a file, or cannot be opened.
            CacheError: it has another size, is not this user's alone, or a process keeps it locked.
        """
        self.path = path
        self.source_hw, self.pixels, self.stays = source_hw, pixels, stays
        self._offsets = _offsets(source_hw, pixels)
        handle = open_direct(path)
        try:
            _share(handle, path)
            if not is_still_named(handle, path):
                raise FileNotFoundError(path)
            status, size = os.fstat(handle), int(self._offsets[-1])
            is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if status.st_size != size + len(self) * _CRC.itemsize or not is_own:
                raise CacheError("not written by this program")
            memory = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
            self._pixels, self._checksums = np.frombuffer(memory, np.uint8, size), np.frombuffer(memory, _CRC, -1, size)
        except BaseException:
            os.close(handle)
            raise
        weakref.finalize(self, _release, handle, self.path, os.getpid(), stays)

    def __len__(self) -> int:
        return len(self.source_hw)

    def __getitem__(self, index: int) -> np.ndarray:
        """(h, w, C), read-only."""
        stored = self._pixels[self._offsets[index] : self._offsets[index + 1]]
        return stored.view(self.pixels.dtype).reshape(*self.source_hw[index], self.pixels.channels)

    def is_intact(self, index: int) -> bool:
        """Whether the pixels of an image are those that were written."""
        return zlib.crc32(self._pixels[self._offsets[index] : self._offsets[index + 1]]) == self._checksums[index]

    def __reduce__(self) -> tuple:
        return RamCache, (self.path, self.source_hw, self.pixels, self.stays)


def _offsets(source_hw: np.ndarray, pixels: PixelFormat) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(source_hw.astype(np.int64).prod(axis=1) * pixels.nbytes)])


def _share(handle: int, path: Path) -> None:
    """Locks the file together with other processes that use it. Raises CacheError if a process does not unlock it."""
    try:
        flock(handle, shared=True)
    except BlockingIOError:
        get_logger().warning("--cache ram: waiting %.0f s for another process that has locked %s", _PATIENCE_S, path)
        try:
            flock(handle, shared=True, patience_s=_PATIENCE_S)
        except BlockingIOError:
            raise CacheError("another process keeps it locked") from None


def _release(handle: int, path: Path, owner: int, stays: bool) -> None:
    """Closes the file; the last process to do so removes it, unless it stays."""
    if os.getpid() != owner:  # a forked worker, whose handle is a copy of its parent's
        return
    with contextlib.suppress(OSError):
        if not stays:
            flock(handle)
            if is_still_named(handle, path):
                os.unlink(path)
    with contextlib.suppress(OSError):  # no data can be lost
        os.close(handle)


def open_ram_cache(
    index: DatasetIndex, folder: Path, flag: str, imgsz: int, decoding: Decoding, *, is_first: bool
) -> RamCache:
    """Fills the node's cache in ``folder``, in memory or for the ``flag`` "tile" on the disk, if necessary, and opens
    it. ``is_first``: of the node's processes; the others open what it has checked or written. See
    `data.cache.open.open_image_cache`."""
    source_hw = reduced_sizes(index.image_hw, imgsz) if imgsz else index.image_hw.astype(np.int32)
    if not folder.is_dir():
        raise UserError(f"{flag}: this system has no {folder}; use --cache disk")
    path, stays = (
        cache_path(folder, index, imgsz, f"v{_LAYOUT}{_SUFFIX}"),
        flag == "tile",
    )
    if is_first and stays:
        remove_older(folder, index)
    is_unknown = is_first
    for _ in range(3):  # another run may remove the file at its end, before it is opened here
        try:
            cache = RamCache(path, source_hw, index.pixels, stays)
            title = f"checking images{'' if stays else ' (ram)'}"
            if is_unknown and not all(decoding.each(cache.is_intact, range(len(cache)), title)):
                raise CacheError("damaged")  # by another run, or since
            return cache
        except FileNotFoundError:
            pass
        except (CacheError, PermissionError) as error:
            discard(flag, error, path)
        is_unknown = False
        left = f"lockstep-{os.getuid()}-*{_SUFFIX}{'.' if stays else ''}*"  # by this user's runs
        remove_abandoned(path.parent.glob(left))
        with FileLock(path.with_suffix(".lock")) as lock:
            if stays:
                lock.wait(f"another run that fills {path}")
            if not (stays and path.exists()):
                _fill(path, index, source_hw, flag, decoding)
    return RamCache(path, source_hw, index.pixels, stays)


def _fill(path: Path, index: DatasetIndex, source_hw: np.ndarray, flag: str, decoding: Decoding) -> None:
    """Decodes all images into a temporary file next to ``path``, then renames it."""
    offsets = _offsets(source_hw, index.pixels)
    size, on_disk = int(offsets[-1]) + len(index) * _CRC.itemsize, flag == "tile"
    if on_disk:
        # A decoder takes the memory of some images: of the file, of its pixels, and of their conversion.
        largest = 3 * int(np.diff(offsets).max())
        most = max(int(available_memory() / 4 / largest), 1)
        decoding = decoding._replace(threads=min(decoding.threads, most))
    disk = shutil.disk_usage(path.parent)
    free = disk.free if on_disk else min(disk.free, available_memory())
    get_logger().info("%s: %s, %.2f GiB in %s", flag, counted(len(index), "image"), size / 2**30, path)
    if size > 0.95 * free:
        remedy = "use --cache disk or none"
        remedy += ", or make it larger (docker run --shm-size)" if size > disk.total else ""
        raise UserError(
            f"{flag}: needs {size / 2**30:.2f} GiB in {path.parent}, {free / 2**30:.2f} GiB are free; "
            f"{'choose another --cache-dir' if on_disk else remedy}"
        )
    handle, temporary = _locked_temporary(path)
    try:
        _reserve(handle, size, path.parent, flag)
        memory = mmap.mmap(handle, size)
        pixels, checksums = np.frombuffer(memory, np.uint8), np.frombuffer(memory, _CRC, -1, int(offsets[-1]))

        def decode(i: int) -> None:
            image = decoding.read(index, i, source_hw)
            pixels[offsets[i] : offsets[i + 1]] = image.reshape(-1).view(np.uint8)
            checksums[i] = zlib.crc32(pixels[offsets[i] : offsets[i + 1]])

        for _ in decoding.each(decode, range(len(index)), "decoding images" if on_disk else "caching images (ram)"):
            pass
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def _locked_temporary(path: Path) -> tuple[int, str]:
    """Creates a file next to ``path`` and locks it. Tries again if another run removes it before it is locked."""
    while True:
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
        flock(handle, shared=True, patience_s=math.inf)
        if is_still_named(handle, temporary):
            return handle, temporary
        os.close(handle)


def _reserve(handle: int, size: int, folder: Path, flag: str) -> None:
    """Allocates the space now: on a full disk, writing to a mapped file kills the process with SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.truncate(handle, size)
    except OSError as error:
        if error.errno in (*DISK_FULL, errno.EFBIG):
            raise UserError(f"{flag}: {folder} is full ({size / 2**30:.2f} GiB needed)") from None
        raise
