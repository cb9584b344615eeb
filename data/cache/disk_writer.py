"""Fills the file of `--cache disk` (disk.py): decodes the images that it lacks, alone or together with other nodes."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch.distributed as dist

from data.cache.decoding import Decoding
from data.cache.named_files import discard
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.distributed.file_exchange import exchange_items
from utils.distributed.groups import Subgroup
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError
from utils.files.array_file import CacheError
from utils.files.locks import FileLock
from utils.files.safe_io import read_text, write_whole
from utils.logger import get_logger, progress
from utils.machine.resources import check_space
from utils.machine.threads import map_ahead
from utils.strings import format_bytes

if TYPE_CHECKING:
    import lmdb

KEY = struct.Struct(">Q")  # number of an image
CRC = struct.Struct("<I")  # CRC-32, after the pixels
_NAME_KEY = b"name"  # key of the file's name, which identifies the images in it
_COMPLETE_SUFFIX = ".complete"
_BATCH_BYTES = 64 << 20  # pixels committed at once
_PAGE_BYTES = mmap.PAGESIZE  # an image's value takes whole pages, with a header of 16 bytes
_VALUE_HEADER_BYTES = 16
_REMEDY = "choose another --cache-dir or --cache none"


class _NodeState(NamedTuple):
    """The state of a node's file, which the node sends to the others."""

    name: str  # file name, which depends on the data set
    is_usable: bool  # complete, or locked by this run
    stored: np.ndarray  # uint8, packed bits: which images are in it

    def stored_images(self, count: int) -> np.ndarray:
        """Returns which of ``count`` images are in the file, bool (count,)."""
        return np.unpackbits(self.stored, count=count).astype(bool)


@dataclass
class DiskCacheWriter:
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
            return  # before taking the lock, which is impossible in a read-only folder
        with self.lock.wait(f"another run that fills {self.path}"):
            missing = np.flatnonzero(~_reuse_or_discard(self.path, len(self.index)))
            if len(missing):
                decoded = map_ahead(lambda i: (i, self._decode(i)), map(int, missing), threads=self.decoding.threads)
                with contextlib.closing(decoded):  # also if a full disk ends it, see `map_ahead`
                    self._store(decoded, len(missing))
            self._mark_complete()

    def fill_with_other_nodes(self, ctx: DistributedContext, leaders: Subgroup) -> bool:
        """Decodes a shard of the images on each node.

        Returns False on all nodes, having done nothing, if their data sets differ or another run is filling a file on
        one of them. A complete file is neither locked nor changed: it may be in a read-only folder.
        """
        assert leaders.handle is not None, "a group of several nodes has a process group"
        names = [f"node {n}" for n in range(leaders.group_size)]
        title = f"disk_cache/{leaders.handle.group_name}"
        rank = leaders.group_rank
        with StoreBarrier(ctx.store, title, rank=rank, names=names, group_ranks=leaders.ranks) as barrier, self.lock:
            local = self._local_state()  # acquires the lock, unless the file is complete; released after this block
            barrier.wait_all()
            states = _gather_states(local, leaders)
            have_same_data = len({state.name for state in states}) == 1
            if not have_same_data or not all(state.is_usable for state in states):
                return False
            self._exchange(states, local, barrier, leaders)
            self._mark_complete()
            barrier.wait_all()
        return True

    def _local_state(self) -> _NodeState:
        """Locks the file, unless it is complete, and returns its state."""
        is_usable = _is_complete(self.path)
        if not is_usable:
            holder = self.lock.acquire()
            is_usable = not holder
        stored = _reuse_or_discard(self.path, len(self.index)) if is_usable else np.zeros(len(self.index), bool)
        return _NodeState(self.path.name, is_usable, np.packbits(stored))

    def _exchange(
        self, states: Sequence[_NodeState], local: _NodeState, barrier: StoreBarrier, leaders: Subgroup
    ) -> None:
        """Divides the decoding among the nodes: stores the images that this node lacks, and sends the others theirs."""
        count = len(self.index)
        stored = np.stack([state.stored_images(count) for state in states])
        is_stored = local.stored_images(count)
        images = exchange_items(
            self.sizes, stored, self._decode, barrier=barrier, group=leaders, threads=self.decoding.threads
        )
        missing = ((i, pixels) for i, pixels in images if not is_stored[i])
        if is_stored.all():  # nothing to write: the file may be in a read-only folder
            for _ in missing:  # iterating sends the images that other nodes lack
                pass
        else:
            self._store(missing, int((~is_stored).sum()))

    def _decode(self, i: int) -> memoryview:
        image = self.decoding.read(self.index, i, self.source_hw)
        return np.ascontiguousarray(image).reshape(-1).view(np.uint8).data

    def _store(self, images: Iterable[tuple[int, memoryview]], count: int) -> None:
        """Writes ``count`` pairs of image number and pixels, in batches. Raises UserError if the file cannot be
        written."""
        import lmdb

        total = format_bytes(int(self.sizes.sum()))
        get_logger().info("--cache disk: %d of %d images, %s in all, into %s", count, len(self.index), total, self.path)
        images = progress(images, desc="caching images (disk)", total=count, enabled=self.decoding.show_progress)
        try:
            with contextlib.closing(self._open()) as environment:
                transaction = environment.begin(write=True)
                transaction.put(_NAME_KEY, os.fsencode(self.path.name))
                uncommitted = 0
                for i, pixels in images:
                    transaction.put(KEY.pack(i), b"".join((pixels, CRC.pack(zlib.crc32(pixels)))))
                    uncommitted += len(pixels)
                    if uncommitted >= _BATCH_BYTES:
                        transaction.commit()
                        transaction = environment.begin(write=True)
                        uncommitted = 0
                transaction.commit()
        except lmdb.Error as error:
            raise UserError(f"--cache disk: {self.path}: cannot be written ({error}); {_REMEDY}") from None

    def _open(self) -> lmdb.Environment:
        """Opens the file for writing, with space for all images. Raises UserError if the disk is too small."""
        import lmdb

        # Every image takes whole pages, and the tree takes less than 1 % more.
        page_counts = -(-(self.sizes + _VALUE_HEADER_BYTES + CRC.size) // _PAGE_BYTES)
        size = int((page_counts * _PAGE_BYTES).sum() * 1.01) + (4 << 20)
        present = self.path.stat().st_size if self.path.exists() else 0
        folder = self.path.parent
        free = shutil.disk_usage(folder).free
        check_space("--cache disk", size - present, free=free, place=folder, remedy=_REMEDY)
        return lmdb.open(
            os.fspath(self.path), subdir=False, lock=False, readahead=False, meminit=False, map_size=max(size, present)
        )

    def _mark_complete(self) -> None:
        """Records name, size and modification time of the file, which must hold all images."""
        if not _is_complete(self.path):
            write_whole(self.path.with_suffix(_COMPLETE_SUFFIX), json.dumps(_stamp(self.path)).encode())


def _gather_states(state: _NodeState, leaders: Subgroup) -> list[_NodeState]:
    """Returns the states of all nodes, by the rank of their leaders."""
    states: list = [None] * leaders.group_size
    dist.all_gather_object(states, state, group=leaders.handle)
    return states


def _stamp(path: Path) -> dict[str, int | str]:
    status = path.stat()
    return {"name": path.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_complete(path: Path) -> bool:
    """Returns whether the file was marked complete and has not changed since."""
    try:
        return path.is_file() and json.loads(read_text(path.with_suffix(_COMPLETE_SUFFIX))) == _stamp(path)
    except (OSError, UserError, ValueError, RecursionError):
        return False


def _reuse_or_discard(path: Path, count: int) -> np.ndarray:
    """Returns which images are in the file, bool (count,). Removes the file if it cannot be used.

    The caller holds the lock of the file, unless the file is complete.
    """
    import lmdb

    stored = np.zeros(count, bool)
    try:
        stored[_stored_images(path, count)] = True
    except (CacheError, OSError, lmdb.Error) as error:
        discard("--cache disk", error, path.with_suffix(_COMPLETE_SUFFIX), path)
    return stored


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
            keys = [key for key in transaction.cursor().iternext(keys=True, values=False) if len(key) == KEY.size]
    if keys and name != os.fsencode(path.name):
        raise CacheError("was not filled under this name")
    numbers = [KEY.unpack(key)[0] for key in keys]
    if any(number >= count for number in numbers):
        raise CacheError("damaged")
    return numbers
