"""Caches on the disk, a file per split and node: ``--cache disk`` (`DiskCache`) and the images that tiles are cut from.

``--cache disk`` holds reduced images in an LMDB file, mapped read-only by all ranks and workers of the node. Images are
committed in batches: an interrupted run loses the last batch, and the next run continues from there. A file is read
only after it is complete, and is never written again afterwards. LMDB has no checksums, and follows damaged page
numbers beyond the end of its file, which kills the process. Therefore a second file records name, size and modification
time of the complete file. If any has changed, because the file was renamed, truncated, copied or written to, the cache
is created again. Each image has a checksum, verified on the first read, which detects flipped bits in pixels, but not
in LMDB's own pages (a thousandth of the file).

Tiles are cut from images at full size in a file of raw pixels (`data.cache.mapped`), of which only the size and the end
are checked: the file's name, which is written last. An image has no checksum, because a tile reads a small part of it.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.cache.mapped import Decoding, MappedImages, decode_into, pixel_offsets
from data.images.decode import reduced_sizes
from data.index.index import DatasetIndex, digest_of
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.array_file import CacheError
from utils.files.locks import FileLock
from utils.files.safe_io import read_text, write_whole
from utils.files.temporary_folder import temporary_folder
from utils.logger import get_logger, progress
from utils.machine.resources import check_space
from utils.pixels import PixelFormat
from utils.program_folders import cache_folder, private_folder
from utils.strings import format_bytes

if TYPE_CHECKING:
    import lmdb

_VERSION = 8  # part of each file name; increase it when the layout of a file or `read_source` changes
_COMPLETE_SUFFIX = ".complete"
_SUFFIXES = (".lmdb", _COMPLETE_SUFFIX, ".pixels")
_KEY = struct.Struct(">Q")  # number of an image
_CRC = struct.Struct("<I")  # CRC-32, after the pixels
_NAME_KEY = b"name"  # key of the file's name, which identifies the images in it
_BATCH_BYTES = 64 << 20  # pixels committed at once
_PAGE_BYTES = mmap.PAGESIZE  # an image's value takes whole pages, with a header of 16 bytes
_VALUE_HEADER_BYTES = 16
_REMEDY = "choose another --cache-dir or --cache none"


class CacheName(NamedTuple):
    """The name of a cache file, which identifies the data set, the version of its images, and the selected images.

    Labels and class names are not part of it, so that editing them causes no decoding. With a size and a suffix it is,
    for example, ``lockstep-1000-train-KEY-CONTENT-SELECTION-IMAGES-640.lmdb``.
    """

    key: str  # identifies user, data set and split, whatever the content
    content: str  # digest of the image files of the split, their pixel format, and the version of this code
    selection: str  # digest of the settings that select images
    images: str  # digest of the selected images

    @classmethod
    def of(cls, index: DatasetIndex) -> CacheName:
        """Names the caches of the images of ``index``."""
        return cls(
            key=f"lockstep-{os.getuid()}-{index.cache_key}",
            content=digest_of(_VERSION, index.image_files, index.pixels.content())[:16],
            selection=digest_of(index.selection)[:16],
            images=index.image_digest()[:16],
        )

    def path(self, folder: Path, imgsz: int, suffix: str) -> Path:
        """Returns the path of the file with images of size ``imgsz``, 0 for full size. ``suffix``: ends its name.

        A file of the same images that was written with other settings is reused.
        """
        path = folder / f"{'-'.join(self)}-{imgsz}{suffix}"
        same_images = f"{glob.escape(self.key)}-{self.content}-*-{self.images}-{imgsz}{suffix}"
        return path if path.exists() else next(folder.glob(same_images), path)

    def replaces(self, name: str) -> bool:
        """Returns whether the file ``name``, with the same key, is out of date: its images have changed, or the same
        settings now select others. Caches for other settings are kept, because runs may alternate between settings."""
        if f"-{self.content}-" not in name:
            return True
        return f"-{self.selection}-" in name and f"-{self.images}-" not in name

    def remove_older(self, folder: Path) -> None:
        """Removes the caches that this one replaces, except caches that are being filled.

        A process that reads a removed cache keeps its mapping until it ends.
        """
        for path in folder.glob(f"{glob.escape(self.key)}-*"):
            if path.suffix in _SUFFIXES and self.replaces(path.name):
                with contextlib.suppress(OSError), FileLock(path.with_suffix(".lock")) as lock:
                    holder = lock.acquire()
                    if not holder:
                        path.unlink()
                        lock.path.unlink()


class DiskCache:
    """Source images by number, from a complete file.

    A process that unpickles the cache maps the file at its first read; forked processes share the mapping.
    """

    def __init__(self, path: Path, source_hw: np.ndarray, pixels: PixelFormat) -> None:
        """Maps ``path``, with images of the sizes ``source_hw`` (N, 2), now: a later run may remove the file.

        Raises UserError if it already has, or if the file cannot be read.
        """
        self.path = path
        self.source_hw = source_hw
        self.pixels = pixels
        try:
            self._inode = os.stat(path).st_ino
        except FileNotFoundError:
            reason = "another run, whose images differ, has just removed it"
            raise UserError(f"--cache disk: {path}: {reason}; start again, or choose another --cache-dir") from None
        self._is_verified = np.zeros(len(source_hw), bool)
        mapped_environment(path, self._inode)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns a read-only copy of an image, (h, w, C), which outlives the mapping. Raises UserError for damage."""
        import lmdb

        shape = (*self.source_hw[index], self.pixels.channels)
        size = int(np.prod(shape, dtype=np.int64)) * self.pixels.dtype.itemsize
        try:
            with mapped_environment(self.path, self._inode).begin() as transaction:
                value = transaction.get(_KEY.pack(index)) or b""
        except lmdb.Error:  # damaged pages
            value = b""
        if not self._is_verified[index]:
            self._is_verified[index] = value[size:] == _CRC.pack(zlib.crc32(memoryview(value)[:size]))
        if len(value) != size + _CRC.size or not self._is_verified[index]:
            raise UserError(f"{self.path}: damaged at image {index}; remove it and start again")
        return np.frombuffer(value, np.uint8, size).view(self.pixels.dtype).reshape(shape)


@functools.cache
def mapped_environment(path: Path, inode: int) -> lmdb.Environment:
    """Maps the file, once per process (until ``mapped_environment.cache_clear()``), read-only and without LMDB's
    locks."""
    import lmdb

    try:
        return lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=4)
    except lmdb.Error as error:
        raise UserError(f"--cache disk: cannot be read ({error})") from None


def open_disk_cache(
    ctx: DistributedContext, index: DatasetIndex, imgsz: int, decoding: Decoding, *, cache_dir: str
) -> DiskCache:
    """Adds missing images to the node's cache in the folder ``cache_dir``, and maps it.

    Call it under `torch_distributed_zero_first`. A run waits while another one fills the file. ``imgsz``: longer side
    of the source images, pixels. Raises UserError if there is not enough disk space, or an image cannot be decoded.
    """
    folder = private_folder(cache_folder(cache_dir), "--cache-dir")
    folder.mkdir(parents=True, exist_ok=True)  # raises if it could not be made
    source_hw = reduced_sizes(index.image_hw, imgsz)
    name = CacheName.of(index)
    path = name.path(folder, imgsz, ".lmdb" if decoding.antialias else "-whole.lmdb")  # these are reduced differently
    if ctx.is_node_leader:
        name.remove_older(folder)
        if not _is_complete(path):  # before taking the lock, which is impossible in a read-only folder
            with FileLock(path.with_suffix(".lock")).wait(f"another run that fills {path}"):
                _fill(path, index, source_hw, decoding)
    return DiskCache(path, source_hw, index.pixels)


def _fill(path: Path, index: DatasetIndex, source_hw: np.ndarray, decoding: Decoding) -> None:
    """Decodes the images that the locked file lacks, and marks it complete. Raises UserError."""
    import lmdb

    sizes = source_hw.astype(np.int64).prod(axis=1) * index.pixels.nbytes
    is_stored = np.zeros(len(index), bool)
    try:
        is_stored[_stored_images(path, len(index))] = True
    except (CacheError, OSError, lmdb.Error) as error:
        _discard("--cache disk", error, path.with_suffix(_COMPLETE_SUFFIX), path)
    missing = np.flatnonzero(~is_stored).tolist()

    if missing:
        total = format_bytes(int(sizes.sum()))
        get_logger().info("--cache disk: %d of %d images, %s in all, into %s", len(missing), len(index), total, path)
        decoded = decoding.read_all(index, missing, source_hw)
        images = progress(decoded, desc="caching images (disk)", total=len(missing), enabled=decoding.show_progress)
        try:
            with contextlib.closing(decoded), contextlib.closing(_open_for_writing(path, sizes)) as environment:
                transaction = environment.begin(write=True)
                transaction.put(_NAME_KEY, os.fsencode(path.name))
                uncommitted = 0
                for i, image in images:
                    pixels = image.tobytes()
                    transaction.put(_KEY.pack(i), pixels + _CRC.pack(zlib.crc32(pixels)))
                    uncommitted += len(pixels)
                    if uncommitted >= _BATCH_BYTES:
                        transaction.commit()
                        transaction = environment.begin(write=True)
                        uncommitted = 0
                transaction.commit()
        except lmdb.Error as error:
            raise UserError(f"--cache disk: {path}: cannot be written ({error}); {_REMEDY}") from None
    if not _is_complete(path):
        write_whole(path.with_suffix(_COMPLETE_SUFFIX), json.dumps(_stamp(path)).encode())


def _open_for_writing(path: Path, sizes: np.ndarray) -> lmdb.Environment:
    """Opens the file with space for all images, ``sizes`` (N,) bytes. Raises UserError if the disk is too small."""
    import lmdb

    # Every image takes whole pages, and the tree takes less than 1 % more.
    page_counts = -(-(sizes + _VALUE_HEADER_BYTES + _CRC.size) // _PAGE_BYTES)
    size = int((page_counts * _PAGE_BYTES).sum() * 1.01) + (4 << 20)
    present = path.stat().st_size if path.exists() else 0
    free = shutil.disk_usage(path.parent).free
    check_space("--cache disk", size - present, free=free, place=path.parent, remedy=_REMEDY)
    return lmdb.open(
        os.fspath(path), subdir=False, lock=False, readahead=False, meminit=False, map_size=max(size, present)
    )


def _stamp(path: Path) -> dict[str, int | str]:
    status = path.stat()
    return {"name": path.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_complete(path: Path) -> bool:
    """Returns whether the file was marked complete and has not changed since."""
    try:
        return path.is_file() and json.loads(read_text(path.with_suffix(_COMPLETE_SUFFIX))) == _stamp(path)
    except (OSError, UserError, ValueError, RecursionError):
        return False


def _stored_images(path: Path, count: int) -> Sequence[int]:
    """Returns the numbers of the images in the file: all ``count`` if it is complete, none if it does not exist.

    Raises CacheError, OSError or lmdb.Error if the file is damaged, or has changed since it was complete.
    """
    import lmdb

    if _is_complete(path):
        return range(count)
    was_complete = os.path.lexists(path.with_suffix(_COMPLETE_SUFFIX))
    if not was_complete and not os.path.lexists(path):
        return []
    if not path.is_file():
        raise CacheError("not a file")
    if was_complete:
        raise CacheError("changed since it was complete")
    with contextlib.closing(lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False)) as environment:
        num_pages = environment.info()["last_pgno"] + 1
        if num_pages * environment.stat()["psize"] > path.stat().st_size:  # reading its pages would raise SIGBUS
            raise lmdb.CorruptedError("truncated")
        with environment.begin() as transaction:
            name = transaction.get(_NAME_KEY)
            keys = [key for key in transaction.cursor().iternext(keys=True, values=False) if len(key) == _KEY.size]
    if keys and name != os.fsencode(path.name):
        raise CacheError("was not filled under this name")
    numbers = [_KEY.unpack(key)[0] for key in keys]
    if any(number >= count for number in numbers):
        raise CacheError("damaged")
    return numbers


def _discard(flag: str, reason: Exception, *files: Path) -> None:
    """Removes the ``files`` of a cache, the last of which cannot be used, and logs a warning.

    Raises UserError if a file cannot be removed.
    """
    cause = reason.strerror if isinstance(reason, OSError) else reason
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: {file}: cannot be used ({cause}), nor removed ({error.strerror})") from None
    get_logger().warning("%s: %s cannot be used (%s); it is created again", flag, files[-1], cause)


def open_full_size_cache(index: DatasetIndex, decoding: Decoding, *, cache_dir: str) -> MappedImages:
    """Fills the node's file of images at full size in the folder ``cache_dir`` if necessary, and maps it.

    The file gets its name once it is complete, and stays for later runs until the data set changes. Call this under
    `torch_distributed_zero_first`. Raises UserError if there is not enough disk space, or an image cannot be decoded.
    """
    folder = private_folder(cache_folder(cache_dir), "--cache-dir")
    folder.mkdir(parents=True, exist_ok=True)  # raises if it could not be made
    name = CacheName.of(index)
    path = name.path(folder, 0, ".pixels")
    source_hw = index.image_hw.astype(np.int32)
    open_file = partial(MappedImages, path, source_hw, index.pixels, end=os.fsencode(path.name))
    name.remove_older(folder)
    with contextlib.suppress(OSError):  # before taking the lock, which is impossible in a read-only folder
        return open_file()
    with FileLock(path.with_suffix(".lock")).wait(f"another run that fills {path}"):
        try:
            return open_file()
        except FileNotFoundError:
            pass
        except OSError as error:
            _discard("tile", error, path)
        size = int(pixel_offsets(source_hw, index.pixels)[-1])
        free = shutil.disk_usage(folder).free
        check_space("tile", size, free=free, place=folder, remedy="choose another --cache-dir")
        with temporary_folder(path) as temporary, open(temporary / "pixels", "x+b") as file:
            decode_into(file.fileno(), index, source_hw, decoding, title=f"tile: {path}")
            os.pwrite(file.fileno(), os.fsencode(path.name), size)
            os.fsync(file.fileno())
            os.replace(temporary / "pixels", path)
        return open_file()  # while locked: a run whose images differ removes the file
