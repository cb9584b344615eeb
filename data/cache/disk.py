"""``--cache disk``: holds decoded source images in one LMDB file per node, mapped read-only by all ranks and workers.

Images are committed in batches: an interrupted run loses the last batch, and the next run continues from there. A file
is read only after it is complete, and is never written again afterwards. On several nodes, each image can be decoded
once in the whole run (`utils.distributed.file_exchange`).

LMDB has no checksums, and follows damaged page numbers beyond the end of its file, which kills the process. Therefore
a second file records the size and the modification time of the complete file. If either has changed, because the file
was truncated, copied or written to, the cache is created again. Each image has a checksum, verified on the first read,
which detects bits of pixels that flip on the disk, but not bits of LMDB's own pages (a thousandth of the file).
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.cache.decoding import Decoding, cache_path, check_space, discard, remove_older
from data.image_io.decode import reduced_sizes
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.distributed.file_exchange import exchange_items
from utils.distributed.groups import Subgroup
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError
from utils.files.array_file import CacheError
from utils.files.folders import cache_folder
from utils.files.locks import FileLock
from utils.files.safe_io import read_text, write_whole
from utils.logger import get_logger, progress
from utils.machine.threads import map_ahead
from utils.pixels import PixelFormat
from utils.strings import format_bytes

if TYPE_CHECKING:
    import lmdb

_SUFFIX = ".lmdb"
_COMPLETE_SUFFIX = ".complete"
_LAYOUT = 4  # part of the file name; increase it when the layout or `read_source` changes
_KEY = struct.Struct(">Q")  # number of an image
_BATCH_BYTES = 64 << 20  # pixels committed at once
_PAGE_BYTES = mmap.PAGESIZE  # an image's value takes whole pages, with a header of 16 bytes
_CRC = struct.Struct("<I")  # CRC-32, after the pixels


class DiskCache:
    """Source images by number, from a complete file.

    A process that unpickles the cache maps the file at its first read; forked processes share the mapping.
    """

    def __init__(self, path: Path, source_hw: np.ndarray, pixels: PixelFormat) -> None:
        """Maps ``path``, with images of the sizes ``source_hw`` (N, 2), at once, as a later run may remove the file."""
        self.path = path
        self.source_hw = source_hw
        self.pixels = pixels
        self._inode = os.stat(path).st_ino
        self._is_verified = np.zeros(len(source_hw), bool)
        _environment(path, self._inode)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns a read-only copy of an image, (h, w, C), which outlives the mapping. Raises UserError for damage."""
        import lmdb

        shape = (*self.source_hw[index], self.pixels.channels)
        size = int(np.prod(shape, dtype=np.int64)) * self.pixels.dtype.itemsize
        try:
            with _environment(self.path, self._inode).begin() as transaction:
                value = transaction.get(_KEY.pack(index)) or b""
        except lmdb.Error:  # damaged pages
            value = b""
        if not self._is_verified[index]:
            self._is_verified[index] = value[size:] == _CRC.pack(zlib.crc32(memoryview(value)[:size]))
        if len(value) != size + _CRC.size or not self._is_verified[index]:
            raise UserError(f"{self.path}: damaged at image {index}; remove it and start again")
        return np.frombuffer(value, np.uint8, size).view(self.pixels.dtype).reshape(shape)


@functools.cache
def _environment(path: Path, inode: int) -> lmdb.Environment:
    """Maps the file once per process, read-only and without LMDB's locks."""
    import lmdb

    try:
        return lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=4)
    except lmdb.Error as error:
        raise UserError(f"--cache disk: cannot be read ({error})") from None


def open_disk_cache(
    index: DatasetIndex,
    cache_dir: str,
    imgsz: int,
    decoding: Decoding,
    ctx: DistributedContext | None = None,
    leaders: Subgroup | None = None,
) -> DiskCache:
    """Adds missing images to the node's cache in the folder ``cache_dir``, and maps it.

    Call it under `torch_distributed_zero_first`.

    Args:
        imgsz: longer side of the source images, pixels.
        ctx: None if this process is alone. Required with ``leaders``.
        leaders: group of the first processes of the nodes, each of which decodes a shard of the images for the caches
            of all nodes; None if each node decodes all images.

    Raises UserError: there is not enough disk space, or an image cannot be decoded.
    """
    folder = cache_folder(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    source_hw = reduced_sizes(index.image_hw, imgsz)
    decoded_whole = "" if decoding.reduces else "-whole"
    path = cache_path(folder, index, imgsz, f"v{_LAYOUT}{decoded_whole}{_SUFFIX}")
    if ctx is None or ctx.is_node_leader:
        remove_older(folder, index)
        writer = _Writer(path, index, source_hw, decoding)
        is_filled = False
        if ctx is not None and leaders is not None and leaders.group_size > 1:
            is_filled = writer.fill_with_other_nodes(ctx, leaders)
        if not is_filled:
            writer.fill()
    return DiskCache(path, source_hw, index.pixels)


@dataclass
class _Writer:
    """Adds missing images to the file."""

    path: Path
    index: DatasetIndex
    source_hw: np.ndarray
    decoding: Decoding

    def __post_init__(self) -> None:
        self.sizes = self.source_hw.astype(np.int64).prod(axis=1) * self.index.pixels.nbytes
        self.lock = FileLock(self.path.with_suffix(".lock"))

    def fill(self) -> None:
        """Decodes all missing images; waits while another run fills the file."""
        if _is_complete(self.path):
            return  # without taking the lock, which a read-only folder cannot have
        with self.lock.wait(f"another run that fills {self.path}"):
            missing = np.flatnonzero(~_stored_images(self.path, len(self.index)))
            if len(missing):
                decoded = map_ahead(lambda i: (i, self._decode(i)), map(int, missing), threads=self.decoding.threads)
                self._store(decoded, len(missing))
            self._mark_complete()

    def fill_with_other_nodes(self, ctx: DistributedContext, leaders: Subgroup) -> bool:
        """Decodes a shard of the images on each node.

        Returns False on all nodes, having done nothing, if their data sets differ or another run is filling a file on
        one of them. A complete file is neither locked nor changed: it may be in a read-only folder.
        """
        import torch.distributed as dist

        assert leaders.handle is not None, "a group of several nodes has a process group"
        names = [f"node {n}" for n in range(leaders.group_size)]
        title = f"disk_cache/{leaders.handle.group_name}"
        with StoreBarrier(ctx.store, title, rank=leaders.local_group_rank, names=names) as barrier, self.lock:
            is_usable = _is_complete(self.path) or not self.lock.acquire()
            local = _stored_images(self.path, len(self.index)) if is_usable else np.zeros(len(self.index), bool)
            barrier.wait_all()
            states: list = [None] * leaders.group_size
            dist.all_gather_object(states, (self.path.name, is_usable, np.packbits(local)), group=leaders.handle)
            have_same_data = len({name for name, _, _ in states}) == 1
            if not have_same_data or not all(usable for _, usable, _ in states):
                return False
            stored = np.stack([np.unpackbits(bits, count=len(local)).astype(bool) for _, _, bits in states])
            images = exchange_items(
                self.sizes, stored, self._decode, barrier=barrier, group=leaders, threads=self.decoding.threads
            )
            missing = (image for image in images if not local[image[0]])
            if local.all():
                for _ in missing:  # iterating sends the images that other nodes lack
                    pass
            else:
                self._store(missing, int((~local).sum()))
            self._mark_complete()
            barrier.wait_all()
        return True

    def _decode(self, i: int) -> memoryview:
        image = self.decoding.read(self.index, i, self.source_hw)
        return np.ascontiguousarray(image).reshape(-1).view(np.uint8).data

    def _store(self, images: Iterable[tuple[int, memoryview]], count: int) -> None:
        """Writes ``count`` images, number and pixels, in batches. Raises UserError if the file cannot be written."""
        import lmdb

        total = format_bytes(int(self.sizes.sum()))
        get_logger().info("--cache disk: %d of %d images, %s in all, into %s", count, len(self.index), total, self.path)
        images = progress(images, desc="caching images (disk)", total=count, enabled=self.decoding.show_progress)
        try:
            with contextlib.closing(self._open()) as environment:
                transaction = environment.begin(write=True)
                uncommitted = 0
                for i, pixels in images:
                    transaction.put(_KEY.pack(i), b"".join((pixels, _CRC.pack(zlib.crc32(pixels)))))
                    uncommitted += len(pixels)
                    if uncommitted >= _BATCH_BYTES:
                        transaction.commit()
                        transaction = environment.begin(write=True)
                        uncommitted = 0
                transaction.commit()
        except lmdb.Error as error:
            remedy = "choose another --cache-dir or --cache none"
            raise UserError(f"--cache disk: {self.path}: cannot be written ({error}); {remedy}") from None

    def _open(self) -> lmdb.Environment:
        """Opens the file for writing, with space for all images. Raises UserError if the disk is too small."""
        import lmdb

        # Every image takes whole pages, and the tree takes less than 1 % more.
        page_counts = -(-(self.sizes + 16 + _CRC.size) // _PAGE_BYTES)
        size = int((page_counts * _PAGE_BYTES).sum() * 1.01) + (4 << 20)
        present = self.path.stat().st_size if self.path.exists() else 0
        folder = self.path.parent
        remedy = "choose another --cache-dir or --cache none"
        check_space(size - present, folder, shutil.disk_usage(folder).free, "--cache disk", remedy)
        return lmdb.open(
            os.fspath(self.path), subdir=False, lock=False, readahead=False, meminit=False, map_size=max(size, present)
        )

    def _mark_complete(self) -> None:
        """Records size and time of the file, which must hold all images."""
        if not _is_complete(self.path):
            write_whole(self.path.with_suffix(_COMPLETE_SUFFIX), json.dumps(_stamp(self.path)).encode())


def _stamp(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_complete(path: Path) -> bool:
    """Whether the file has not changed since it was marked complete."""
    try:
        return path.is_file() and json.loads(read_text(path.with_suffix(_COMPLETE_SUFFIX))) == _stamp(path)
    except (OSError, UserError, ValueError, RecursionError):
        return False


def _stored_images(path: Path, count: int) -> np.ndarray:
    """Returns which images are in the file, bool (count,).

    Removes a file that is damaged, or has changed since it was complete: the caller holds its lock, unless it is
    complete.
    """
    import lmdb

    if _is_complete(path):
        return np.ones(count, bool)
    stored = np.zeros(count, bool)
    marker = path.with_suffix(_COMPLETE_SUFFIX)
    if not os.path.lexists(path) and not os.path.lexists(marker):
        return stored
    try:
        if not path.is_file():
            raise CacheError("not a file")
        if os.path.lexists(marker):
            raise CacheError("changed since it was complete")
        with contextlib.closing(lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False)) as environment:
            pages = environment.info()["last_pgno"] + 1
            if pages * environment.stat()["psize"] > path.stat().st_size:  # reading its pages would raise SIGBUS
                raise lmdb.CorruptedError("truncated")
            with environment.begin() as transaction:
                keys = [key for key in transaction.cursor().iternext(keys=True, values=False) if len(key) == _KEY.size]
    except (CacheError, OSError, lmdb.Error) as error:
        discard("--cache disk", error, marker, path)
        return stored
    stored[[_KEY.unpack(key)[0] for key in keys]] = True
    return stored
