"""Caches on the disk, a file per split and node: ``--cache disk`` (`DiskCache`) and the images that tiles are cut from.

A file is written in a temporary folder and gets its name once it is complete; it is never written again. It contains
its name, because a file of another data set may have been copied here. A run that is interrupted while it fills a cache
leaves nothing that another opens. Its name, such as ``lockstep-1000-train-KEY-CONTENT-IMAGES-640.lmdb``, identifies the
user, the part of a data set, the version of its image files, and the images in use; not their labels, so that editing
these causes no decoding.

``--cache disk`` holds reduced images in an LMDB file, mapped read-only by all ranks and workers of the node. A file
that has been cut off is created again: reading beyond its end would kill the process. Each image has a checksum,
verified on the first read, which detects flipped bits in pixels, but not in LMDB's own pages (a thousandth of the
file).

Tiles are cut from images at full size in a file of raw pixels (`data.cache.mapped`), which ends with the file's name.
An image has no checksum, because a tile reads a small part of it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from data.cache.mapped import Decoding, MappedImages, decode_into, pixel_offsets
from data.images.decode import reduced_sizes
from data.index import DatasetIndex, digest_of
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.files.temporary_folder import temporary_folder
from utils.logger import get_logger, progress
from utils.machine.resources import check_space
from utils.pixels import PixelFormat
from utils.program_folders import cache_folder, private_folder
from utils.strings import counted, format_bytes

if TYPE_CHECKING:
    import lmdb

Cache = TypeVar("Cache")
_VERSION = 9  # part of each file name; increase it when the layout of a file or `read_source` changes
_SUFFIXES = (".lmdb", ".pixels")
_KEY = struct.Struct(">Q")  # number of an image
_CRC = struct.Struct("<I")  # CRC-32, after the pixels
_NAME_KEY = b"name"  # key of the file's name, which identifies the images in it
_BATCH_BYTES = 64 << 20  # pixels committed at once
_PAGE_BYTES = mmap.PAGESIZE  # an image's value takes whole pages, with a header of 16 bytes
_VALUE_HEADER_BYTES = 16
_REMEDY = "choose another --cache-dir or --cache none"


class DiskCache:
    """Source images by number, from a complete file.

    A process that unpickles the cache maps the file at its first read; forked processes share the mapping.
    """

    def __init__(self, path: Path, source_hw: np.ndarray, pixels: PixelFormat) -> None:
        """Maps ``path``, with images of the sizes ``source_hw`` (N, 2), now: a later run may remove the file.

        Raises OSError if there is no file, or if it is damaged or was completed under another name.
        """
        self.path = path
        self.source_hw = source_hw
        self.pixels = pixels
        status = os.stat(path)
        self._inode = status.st_ino
        self._is_verified = np.zeros(len(source_hw), bool)
        environment = mapped_environment(path, self._inode)
        if (environment.info()["last_pgno"] + 1) * environment.stat()["psize"] > status.st_size:
            raise OSError(errno.EINVAL, "is cut off", str(path))
        with environment.begin() as transaction:
            if transaction.get(_NAME_KEY) != os.fsencode(path.name):
                raise OSError(errno.EINVAL, "was not completed under this name", str(path))

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns a read-only copy of an image, (h, w, C), which outlives the mapping. Raises UserError for damage."""
        import lmdb

        shape = (*self.source_hw[index], self.pixels.channels)
        size = int(np.prod(shape, dtype=np.int64)) * self.pixels.dtype.itemsize
        try:
            with mapped_environment(self.path, self._inode).begin() as transaction:
                value = transaction.get(_KEY.pack(index)) or b""
        except (lmdb.Error, OSError):  # damaged pages
            value = b""
        if not self._is_verified[index]:
            self._is_verified[index] = value[size:] == _CRC.pack(zlib.crc32(memoryview(value)[:size]))
        if len(value) != size + _CRC.size or not self._is_verified[index]:
            raise UserError(f"{self.path}: damaged at image {index}; remove it")
        return np.frombuffer(value, np.uint8, size).view(self.pixels.dtype).reshape(shape)


@functools.cache
def mapped_environment(path: Path, inode: int) -> lmdb.Environment:
    """Maps the file, once per process (until ``mapped_environment.cache_clear()``), read-only and without LMDB's
    locks. Raises OSError if LMDB cannot open it."""
    import lmdb

    try:
        return lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=4)
    except lmdb.Error as error:
        raise OSError(errno.EINVAL, f"cannot be read: {error}", str(path)) from None


def open_disk_cache(index: DatasetIndex, imgsz: int, decoding: Decoding, *, cache_dir: str) -> DiskCache:
    """Fills the node's cache of reduced images in the folder ``cache_dir`` if necessary, and maps it.

    Call it under `torch_distributed_zero_first`. A run waits while another one fills the file. ``imgsz``: longer side
    of the source images, pixels. Raises UserError if there is not enough disk space, or an image cannot be decoded.
    """
    source_hw = reduced_sizes(index.image_hw, imgsz)
    suffix = ".lmdb" if decoding.antialias else "-whole.lmdb"  # these are reduced differently

    def fill(file: Path, name: str) -> None:
        _write_lmdb(file, name, index, source_hw, decoding)

    def open_file(path: Path) -> DiskCache:
        return DiskCache(path, source_hw, index.pixels)

    return _open_or_fill("--cache disk", index, imgsz, suffix, open_file, fill, cache_dir)


def open_full_size_cache(index: DatasetIndex, decoding: Decoding, *, cache_dir: str) -> MappedImages:
    """Fills the node's file of images at full size in the folder ``cache_dir`` if necessary, and maps it.

    Call it under `torch_distributed_zero_first`. Raises UserError if there is not enough disk space, or an image cannot
    be decoded.
    """
    source_hw = index.image_hw.astype(np.int32)

    def fill(file: Path, name: str) -> None:
        size = int(pixel_offsets(source_hw, index.pixels)[-1])
        free = shutil.disk_usage(file.parent).free
        check_space("tile", size, free=free, place=file.parents[1], remedy="choose another --cache-dir")
        with open(file, "x+b") as opened:
            decode_into(opened.fileno(), index, source_hw, decoding, title=f"tile: {file.parents[1] / name}")
            os.pwrite(opened.fileno(), os.fsencode(name), size)
            os.fsync(opened.fileno())

    def open_file(path: Path) -> MappedImages:
        return MappedImages(path, source_hw, index.pixels, end=os.fsencode(path.name))

    return _open_or_fill("tile", index, 0, ".pixels", open_file, fill, cache_dir)


def _open_or_fill(
    title: str,
    index: DatasetIndex,
    imgsz: int,
    suffix: str,
    open_file: Callable[[Path], Cache],
    fill: Callable[[Path, str], None],
    cache_dir: str,
) -> Cache:
    """Opens the cache file of ``index``, or else fills one and gives it its name.

    ``open_file`` raises OSError for a file that cannot be used. ``fill`` writes a file that will have a name. Raises
    UserError if a file that cannot be used cannot be removed.
    """
    folder = private_folder(cache_folder(cache_dir), "--cache-dir")
    folder.mkdir(parents=True, exist_ok=True)  # raises if it could not be made
    key = f"lockstep-{os.getuid()}-{index.cache_key}"
    content = digest_of(_VERSION, index.image_files, index.pixels.content())[:16]
    name = f"{key}-{content}-{index.image_digest()[:16]}"
    path = folder / f"{name}-{imgsz}{suffix}"
    # Caches of other images are removed, unless they are being filled. Who reads one keeps its mapping.
    for other in folder.glob(f"{glob.escape(key)}-*"):
        if other.suffix in _SUFFIXES and not other.name.startswith(f"{name}-"):
            with contextlib.suppress(OSError), FileLock(other.with_suffix(".lock")) as lock:
                holder = lock.acquire()
                if not holder:
                    other.unlink()
                    lock.path.unlink()
    with contextlib.suppress(OSError):  # before taking the lock, which is impossible in a read-only folder
        return open_file(path)
    with FileLock(path.with_suffix(".lock")).wait(f"another run that fills {path}"):
        try:
            return open_file(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            try:
                path.unlink()
            except OSError as unlink_error:
                reason = f"cannot be used ({error.strerror}), nor removed ({unlink_error.strerror})"
                raise UserError(f"{title}: {path}: {reason}") from None
            get_logger().warning("%s: %s cannot be used (%s); it is created again", title, path, error.strerror)
        with temporary_folder(path) as temporary:
            fill(temporary / "images", path.name)
            os.replace(temporary / "images", path)
        return open_file(path)  # while locked: a run whose images differ removes the file


def _write_lmdb(file: Path, name: str, index: DatasetIndex, source_hw: np.ndarray, decoding: Decoding) -> None:
    """Decodes all images into a new LMDB file, which will be called ``name``. Raises UserError."""
    import lmdb

    place = file.parents[1]
    sizes = source_hw.astype(np.int64).prod(axis=1) * index.pixels.nbytes
    total = format_bytes(int(sizes.sum()))
    get_logger().info("--cache disk: %s, %s, into %s", counted(len(index), "image"), total, place / name)
    # Every image takes whole pages, and the tree takes less than 1 % more.
    page_counts = -(-(sizes + _VALUE_HEADER_BYTES + _CRC.size) // _PAGE_BYTES)
    map_size = int((page_counts * _PAGE_BYTES).sum() * 1.01) + (4 << 20)
    check_space("--cache disk", map_size, free=shutil.disk_usage(place).free, place=place, remedy=_REMEDY)
    decoded = decoding.read_all(index, range(len(index)), source_hw)
    images = progress(decoded, desc="caching images (disk)", total=len(index), enabled=decoding.show_progress)
    try:
        environment = lmdb.open(
            os.fspath(file), subdir=False, lock=False, readahead=False, meminit=False, map_size=map_size
        )
        with contextlib.closing(decoded), contextlib.closing(environment):
            transaction = environment.begin(write=True)
            uncommitted = 0
            for i, image in images:
                pixels = image.tobytes()
                transaction.put(_KEY.pack(i), pixels + _CRC.pack(zlib.crc32(pixels)))
                uncommitted += len(pixels)
                if uncommitted >= _BATCH_BYTES:  # which limits the memory that a transaction takes
                    transaction.commit()
                    transaction = environment.begin(write=True)
                    uncommitted = 0
            transaction.put(_NAME_KEY, os.fsencode(name))
            transaction.commit()
    except lmdb.Error as error:
        raise UserError(f"--cache disk: {place / name}: cannot be written ({error}); {_REMEDY}") from None
