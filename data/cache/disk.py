"""``--cache disk``: holds decoded source images in an LMDB file per split and node, mapped read-only by all its ranks
and workers.

Images are committed in batches: an interrupted run loses the last batch, and the next run continues from there. A file
is read only after it is complete, and is never written again afterwards. On several nodes, each image can be decoded
once in the whole run (`utils.distributed.file_exchange`).

LMDB has no checksums, and follows damaged page numbers beyond the end of its file, which kills the process. Therefore
a second file records name, size and modification time of the complete file. If any has changed, because the file was
renamed, truncated, copied or written to, the cache is created again. Each image has a checksum, verified on the first
read, which detects flipped bits in pixels, but not in LMDB's own pages (a thousandth of the file).
"""

from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.cache.decoding import Decoding
from data.cache.disk_writer import CRC, KEY, DiskCacheWriter
from data.cache.named_files import CacheName
from data.images.reduce import reduced_sizes
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.distributed.groups import Subgroup
from utils.errors import UserError
from utils.pixels import PixelFormat
from utils.program_folders import cache_folder

if TYPE_CHECKING:
    import lmdb

_SUFFIX = ".lmdb"


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
        _environment(path, self._inode)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns a read-only copy of an image, (h, w, C), which outlives the mapping. Raises UserError for damage."""
        import lmdb

        shape = (*self.source_hw[index], self.pixels.channels)
        size = int(np.prod(shape, dtype=np.int64)) * self.pixels.dtype.itemsize
        try:
            with _environment(self.path, self._inode).begin() as transaction:
                value = transaction.get(KEY.pack(index)) or b""
        except lmdb.Error:  # damaged pages
            value = b""
        if not self._is_verified[index]:
            self._is_verified[index] = value[size:] == CRC.pack(zlib.crc32(memoryview(value)[:size]))
        if len(value) != size + CRC.size or not self._is_verified[index]:
            raise UserError(f"{self.path}: damaged at image {index}; remove it and start again")
        return np.frombuffer(value, np.uint8, size).view(self.pixels.dtype).reshape(shape)


@functools.cache
def _environment(path: Path, inode: int) -> lmdb.Environment:
    """Maps the file, once per process, read-only and without LMDB's locks."""
    import lmdb

    try:
        return lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=4)
    except lmdb.Error as error:
        raise UserError(f"--cache disk: cannot be read ({error})") from None


def unmap_disk_caches() -> None:
    """Drops the mappings of this process. A file that has been replaced or changed is then mapped anew."""
    _environment.cache_clear()


def open_disk_cache(
    ctx: DistributedContext,
    index: DatasetIndex,
    imgsz: int,
    decoding: Decoding,
    *,
    cache_dir: str,
    leaders: Subgroup | None = None,
) -> DiskCache:
    """Adds missing images to the node's cache in the folder ``cache_dir``, and maps it.

    Call it under `torch_distributed_zero_first`.

    Args:
        imgsz: longer side of the source images, pixels.
        leaders: group of the first processes of the nodes, each of which decodes a shard of the images for the caches
            of all nodes; None if each node decodes all images.

    Raises UserError if there is not enough disk space, or an image cannot be decoded.
    """
    folder = cache_folder(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    source_hw = reduced_sizes(index.image_hw, imgsz)
    name = CacheName.of(index)
    suffix = _SUFFIX if decoding.antialias else f"-whole{_SUFFIX}"  # the images are reduced differently
    path = name.path(folder, imgsz, suffix)
    if ctx.is_node_leader:
        name.remove_older(folder)
        writer = DiskCacheWriter(path, index, source_hw, decoding)
        if leaders is None or not writer.fill_with_other_nodes(ctx, leaders):
            writer.fill()
    return DiskCache(path, source_hw, index.pixels)
