"""``--cache ram``: decoded source images in one file a node in memory, mapped by every rank and worker.

The file is raw pixels; where each image lies follows from the index, so it has no header. It appears under its name
only when complete. It lives in /dev/shm: every process that maps it holds a shared lock, the last one to end removes
it, and what a killed run left is reused by a run on the same data or removed by any other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.image_io.decode import Complain, read_source, reduced_sizes
from data.index.index import DatasetIndex
from utils.errors import UserError
from utils.files.caches import close_quietly
from utils.files.folders import SHARED_MEMORY
from utils.files.locks import flock, is_still_named, remove_abandoned
from utils.logger import get_logger, progress

_SUFFIX = ".pixels"
_LAYOUT = 2  # part of the file's name: raise it when the layout or `read_source` changes


class RamCache:
    """Source images by number, as read-only views of a mapped file. Picklable: a worker maps the file again."""

    def __init__(self, path: Path, source_hw: np.ndarray) -> None:
        """Maps ``path``, which holds images of the sizes ``source_hw`` (N, 2) one after the other.

        Raises:
            FileNotFoundError: the file is not there, or was removed while it was being opened.
        """
        self.path = path
        self.source_hw = source_hw
        self._offsets = _offsets(source_hw)
        self._open()

    def _open(self) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        try:
            flock(handle, shared=True, waits=True)
            opened, named = os.fstat(handle), os.stat(self.path)
            if (opened.st_ino, opened.st_size) != (named.st_ino, int(self._offsets[-1])):
                raise FileNotFoundError(self.path)
            self._pixels = np.memmap(self.path, np.uint8, mode="r", shape=(opened.st_size,)).view(np.ndarray)
        except BaseException:
            os.close(handle)
            raise
        self._release = weakref.finalize(self, _release, handle, self.path, os.getpid())

    def __len__(self) -> int:
        return len(self.source_hw)

    def __getitem__(self, index: int) -> np.ndarray:
        """uint8 (h, w, 3) RGB, read-only."""
        pixels = self._pixels[self._offsets[index] : self._offsets[index + 1]]
        return pixels.reshape(*self.source_hw[index], 3)

    def __getstate__(self) -> dict:
        return {"path": self.path, "source_hw": self.source_hw}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def close(self) -> None:
        """Gives the file up; the last process to do so removes it."""
        self._release()


def _offsets(source_hw: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(source_hw.astype(np.int64).prod(axis=1) * 3)])


def _release(handle: int, path: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked worker holds a copy of the parent's handle and decides nothing
        return
    with contextlib.suppress(OSError):
        flock(handle)
        if is_still_named(handle, path):
            os.unlink(path)
    close_quietly(handle)


def open_ram_cache(
    index: DatasetIndex,
    *,
    imgsz: int,
    threads: int = 4,
    show_progress: bool = True,
    shared_memory: Path = SHARED_MEMORY,
    complain: Complain | None = None,
) -> RamCache:
    """The node's cache in memory, filled first if it is not there. Call under `torch_distributed_zero_first`.

    Args:
        index: the images.
        imgsz: longer side of the source images, pixels.
        threads: decoders.
        shared_memory: a file system in memory.
        complain: called for damaged images, see `data.image_io.decode`.

    Raises:
        UserError: not enough memory, or an image that cannot be decoded.
    """
    source_hw = reduced_sizes(index.image_hw, imgsz)
    if not shared_memory.is_dir():
        raise UserError(f"--cache ram: this system has no {shared_memory}; use --cache disk")
    name = f"lockstep-{os.getuid()}-{index.fingerprint[:32]}-{imgsz}-v{_LAYOUT}{_SUFFIX}"
    path = shared_memory / name
    for _ in range(3):  # another run may end, and remove it, between our filling and our opening
        with contextlib.suppress(FileNotFoundError):
            return RamCache(path, source_hw)
        remove_abandoned(shared_memory.glob(f"lockstep-{os.getuid()}-*{_SUFFIX}*"))  # of this user's runs
        _fill(path, index, source_hw, threads, show_progress, complain)
    return RamCache(path, source_hw)


def _free_bytes(folder: Path) -> int:
    free = shutil.disk_usage(folder).free
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        free = min(free, int(available.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" in a container without a limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def _fill(
    path: Path,
    index: DatasetIndex,
    source_hw: np.ndarray,
    threads: int,
    show_progress: bool,
    complain: Complain | None,
) -> None:
    """Decodes all images into a temporary file beside ``path`` and renames it."""
    offsets = _offsets(source_hw)
    size, free = int(offsets[-1]), _free_bytes(path.parent)
    get_logger().info("--cache ram: %d images, %.2f GiB in %s", len(index), size / 2**30, path)
    if size > 0.95 * free:
        is_small = size > shutil.disk_usage(path.parent).total
        raise UserError(
            f"--cache ram: needs {size / 2**30:.2f} GiB in {path.parent}, {free / 2**30:.2f} GiB are free; "
            f"use --cache disk or none{', or make it larger (docker run --shm-size)' if is_small else ''}"
        )
    handle, temporary = _locked_temporary(path)
    try:
        _reserve(handle, size, path.parent)
        pixels = np.memmap(temporary, np.uint8, mode="r+", shape=(size,))

        def decode(i: int) -> None:
            image = read_source(index.path(i), index.image_hw[i], source_hw[i], complain)
            pixels[offsets[i] : offsets[i + 1]] = image.reshape(-1)

        pool = ThreadPoolExecutor(max(threads, 1))
        try:
            done = pool.map(decode, range(len(index)))
            for _ in progress(done, desc="caching images (ram)", total=len(index), enabled=show_progress):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
        pixels.flush()
        os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def _locked_temporary(path: Path) -> tuple[int, str]:
    """A new file beside ``path``, held as what is under way; another run may remove it before it is locked."""
    while True:
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
        flock(handle, shared=True, waits=True)
        if is_still_named(handle, temporary):
            return handle, temporary
        os.close(handle)


def _reserve(handle: int, size: int, folder: Path) -> None:
    """Takes the space now: a mapped file that runs out of it later would end the process with SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.truncate(handle, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"--cache ram: {folder} is full ({size / 2**30:.2f} GiB wanted)") from None
        raise
