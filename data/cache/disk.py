"""``--cache disk``: decoded source images in one LMDB file a node, which all ranks and workers map read-only.

The page cache holds what they read, once for the node. Images are stored as they are decoded, in committed batches, so
a filling that is killed loses the last batch and the next one goes on from there. Only a complete file is read from; it
is never written again. On several nodes each image may be decoded once in the run (`utils.distributed.file_exchange`).

LMDB has no checksums, and follows damaged pages out of its file, which ends the process. So each image has one, looked
at when a process first reads it, and beside a complete file is another with the checksum of its pages that hold no
pixels (a thousandth of it), looked at before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.image_io.decode import Complain, read_source, reduced_sizes
from data.index.index import DatasetIndex
from utils.distributed.context import DistributedContext
from utils.distributed.file_exchange import Piece, exchange_items
from utils.distributed.groups import Subgroup
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError
from utils.files.array_file import CacheError, open_arrays, write_arrays
from utils.files.caches import hold, make_room
from utils.files.folders import cache_folder
from utils.files.locks import FileLock
from utils.logger import get_logger, progress
from utils.threads import map_ahead

if TYPE_CHECKING:
    import lmdb

_SUFFIX = ".lmdb"
_TREE_SUFFIX = ".tree"
_LAYOUT = 4  # part of the file's name: raise it when the layout or `read_source` changes
_KEY = struct.Struct(">Q")  # an image's number
_BATCH_BYTES = 64 << 20
_PAGE = 4096  # of an image, whose value takes whole pages with a header of 16 bytes
_SUM = struct.Struct("<I")  # CRC-32, after the pixels
# Of a page's header in LMDB's file: its flags, and how many pages a value that begins there has.
_PAGE_HEADER = struct.Struct("<10xHI")
_OF_A_VALUE = 4  # among the flags


class DiskCache:
    """Source images by number, from a complete file. Picklable: another process maps the file when it first reads."""

    def __init__(self, path: Path, source_hw: np.ndarray) -> None:
        """``path`` holds images of the sizes ``source_hw`` (N, 2), and is not removed while this lives."""
        self.path = path
        self.source_hw = source_hw
        self._environment: lmdb.Environment | None = None
        self._is_checked = np.zeros(len(source_hw), bool)  # by this process
        hold(self, path)

    def __len__(self) -> int:
        return len(self.source_hw)

    def __getstate__(self) -> dict:
        return {"path": self.path, "source_hw": self.source_hw}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _environment=None, _is_checked=np.zeros(len(state["source_hw"]), bool))

    def __getitem__(self, index: int) -> np.ndarray:
        """uint8 (h, w, 3) RGB, read-only; a copy, for the file's pages may go when the process closes it."""
        if self._environment is None:
            self._environment = _environment(self.path, os.stat(self.path).st_ino)
        shape = (*self.source_hw[index], 3)
        value = self._stored_value(index)
        size = int(np.prod(shape, dtype=np.int64))
        if value is None or len(value) != size + _SUM.size or not self._has_right_sum(index, value):
            raise UserError(f"{self.path}: is damaged at image {index}; remove it and start again")
        return np.frombuffer(value, np.uint8, size).reshape(shape)

    def _stored_value(self, index: int) -> bytes | None:
        import lmdb

        assert self._environment is not None
        try:
            with self._environment.begin() as transaction:
                return transaction.get(_KEY.pack(index))
        except lmdb.Error:  # it found pages of another kind than it looked for
            return None

    def _has_right_sum(self, index: int, value: bytes) -> bool:
        """Whether the pixels are those that were stored. Asked once an image: the file is never written again."""
        if not self._is_checked[index]:
            pixels, stored = memoryview(value)[: -_SUM.size], value[-_SUM.size :]
            self._is_checked[index] = _SUM.pack(zlib.crc32(pixels)) == stored
        return bool(self._is_checked[index])

    def close(self) -> None:
        """Nothing to give up: the mapping is the process's."""


@functools.cache
def _environment(path: Path, inode: int) -> lmdb.Environment:
    """The file, mapped once a process. A forked worker may use its parent's: without LMDB's lock table, and read-only,
    nothing in it is tied to the process."""
    import lmdb

    try:
        return lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=4)
    except lmdb.Error as error:
        raise UserError(f"--cache disk: cannot be read ({error})") from None


def open_disk_cache(
    index: DatasetIndex,
    *,
    imgsz: int,
    cache_dir: str = "",
    threads: int = 4,
    show_progress: bool = True,
    ctx: DistributedContext | None = None,
    leaders: Subgroup | None = None,
    complain: Complain | None = None,
) -> DiskCache:
    """The node's cache, filled first as far as it is not. See `data.cache.open.open_image_cache`."""
    folder = cache_folder(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"--cache disk: {folder}: cannot be made ({reason}); choose another --cache-dir") from None
    source_hw = reduced_sizes(index.image_hw, imgsz)
    path = folder / f"lockstep-{os.getuid()}-{index.fingerprint[:32]}-{imgsz}-v{_LAYOUT}{_SUFFIX}"
    if ctx is None or ctx.is_node_leader:
        filling = _Filling(path, index, source_hw, threads, show_progress, complain)
        if leaders is None or leaders.group_size == 1:
            filling.alone()
        else:
            assert ctx is not None
            assert leaders.handle is not None
            names = [f"node {n}" for n in range(leaders.group_size)]
            title = f"disk_cache/{leaders.handle.group_name}"
            with StoreBarrier(ctx.store, title, rank=leaders.local_group_rank, names=names) as barrier:
                together = filling.together(barrier, leaders)
            if not together:
                filling.alone()
    return DiskCache(path, source_hw)


class _Filling:
    """Puts the images that are not in the file yet into it."""

    def __init__(
        self,
        path: Path,
        index: DatasetIndex,
        source_hw: np.ndarray,
        threads: int,
        show_progress: bool,
        complain: Complain | None,
    ) -> None:
        self._path = path
        self._index = index
        self._source_hw = source_hw
        self._sizes = source_hw.astype(np.int64).prod(axis=1) * 3
        self._threads = threads
        self._show_progress = show_progress
        self._complain = complain
        self._lock = FileLock(path.with_suffix(".lock"))

    def alone(self) -> None:
        """By this process; waits while another run is at it."""
        if _is_complete(self._path):
            return
        self._lock.wait(f"another run that fills {self._path}")
        with self._lock:
            held = _stored(self._path, len(self._index))
            missing = np.flatnonzero(~held)
            if len(missing):
                decoded = map_ahead(lambda i: (i, self._decode(i)), map(int, missing), threads=self._threads)
                self._store(decoded, len(missing))
            self._seal()

    def together(self, barrier: StoreBarrier, leaders: Subgroup) -> bool:
        """By all leaders, a part each. False, on all of them and with nothing done, where they cannot: the nodes' data
        sets differ, or another run is filling a file on one of them."""
        import torch.distributed as dist

        with self._lock:
            locked = not self._lock.acquire()
            own = _stored(self._path, len(self._index))
            barrier.wait_all()
            states: list = [None] * leaders.group_size
            dist.all_gather_object(states, (self._path.name, locked, np.packbits(own)), group=leaders.handle)
            if len({name for name, _, _ in states}) > 1 or not all(locked for _, locked, _ in states):
                return False
            held = np.stack([np.unpackbits(bits, count=len(own)).astype(bool) for _, _, bits in states])
            if held.all():
                self._seal()
                return True
            pieces = exchange_items(
                self._sizes,
                held,
                lambda i: [self._decode(i)],
                barrier=barrier,
                group=leaders,
                threads=self._threads,
            )
            self._store(_whole(pieces, own), int((~own).sum()))
            self._seal()
            barrier.wait_all()
        return True

    def _decode(self, i: int) -> memoryview:
        image = read_source(self._index.path(i), self._index.image_hw[i], self._source_hw[i], self._complain)
        return memoryview(np.ascontiguousarray(image).reshape(-1))

    def _store(self, images: Iterable[tuple[int, memoryview | bytes]], count: int) -> None:
        """Writes ``count`` images."""
        total = int(self._sizes.sum())
        get_logger().info(
            "--cache disk: %d of %d images, %.2f GiB in all, into %s",
            count, len(self._index), total / 2**30, self._path,
        )  # fmt: skip
        with self._failures(), contextlib.closing(self._open()) as environment:
            put = functools.partial(_put, environment)
            batch: list[tuple[bytes, memoryview | bytes]] = []
            waiting = 0
            for i, pixels in progress(images, desc="caching images (disk)", total=count, enabled=self._show_progress):
                batch.append((_KEY.pack(i), b"".join((pixels, _SUM.pack(zlib.crc32(pixels))))))
                waiting += len(pixels)
                if waiting >= _BATCH_BYTES:
                    put(batch)
                    batch, waiting = [], 0
            put(batch)

    def _seal(self) -> None:
        """Marks the file, which holds all images, as complete."""
        tree = self._path.with_suffix(_TREE_SUFFIX)
        if not tree.exists():
            with self._failures():
                pages = _pages_without_pixels(self._path)
                meta = {"bytes": self._path.stat().st_size, "sum": _sum_of(self._path, pages)}
                write_arrays(tree, meta, {"pages": pages})

    def _open(self) -> lmdb.Environment:
        """The file for writing, with room for all; raises UserError when the disk has none."""
        import lmdb

        # Every image takes whole pages; one in a hundred more for the tree above them.
        size = int((-(-(self._sizes + 16) // _PAGE) * _PAGE).sum() * 1.01) + (4 << 20)
        there = self._path.stat().st_size if self._path.exists() else 0
        make_room(self._path.parent, size - there, keep=self._path)
        free = _free_bytes(self._path.parent)
        if size - there > 0.98 * free:
            raise UserError(
                f"--cache disk: needs {(size - there) / 2**30:.2f} GiB more in {self._path.parent}, "
                f"{free / 2**30:.2f} GiB are free; choose another --cache-dir or --cache none"
            )
        return lmdb.open(
            os.fspath(self._path), subdir=False, lock=False, readahead=False, meminit=False, map_size=max(size, there)
        )

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        import lmdb

        try:
            yield
        except (OSError, lmdb.DiskError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"--cache disk: {self._path.parent} is full; choose another --cache-dir or --cache none"
            ) from None
        except lmdb.Error as error:
            raise UserError(f"--cache disk: {self._path}: cannot be written ({error})") from None


def _put(environment: lmdb.Environment, batch: list[tuple[bytes, memoryview | bytes]]) -> None:
    """Commits a batch; when it returns, it is on disk. LMDB takes a write that falls short for an error, which is gone
    when all is written again; what has really failed fails again."""
    import lmdb

    has_failed = False
    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, value in batch:
                    transaction.put(key, value)
            return
        except lmdb.MapFullError:
            environment.set_mapsize(environment.info()["map_size"] * 5 // 4)
        except lmdb.Error:
            if has_failed:
                raise
            has_failed = True


def _whole(pieces: Iterable[Piece], own: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """The images that this node lacks, put together from their pieces."""
    parts: dict[int, list[bytes]] = {}
    for piece in pieces:
        if own[piece.item]:
            continue
        parts.setdefault(piece.item, []).append(bytes(piece.data))
        if piece.digest:
            yield piece.item, b"".join(parts.pop(piece.item))


def _pages_without_pixels(path: Path) -> np.ndarray:
    """Numbers of the pages of a file that LMDB needs to find its values, int64 ascending."""
    pages, at = [], 0
    with open(path, "rb", buffering=0) as file:
        last = os.fstat(file.fileno()).st_size // _PAGE
        while at < last:
            flags, count = _PAGE_HEADER.unpack(os.pread(file.fileno(), _PAGE_HEADER.size, at * _PAGE))
            if flags & _OF_A_VALUE:
                at += max(count, 1)
            else:
                pages.append(at)
                at += 1
    return np.array(pages, np.int64)


def _sum_of(path: Path, pages: np.ndarray) -> int:
    total = 0
    with open(path, "rb", buffering=0) as file:
        for page in pages.tolist():
            total = zlib.crc32(os.pread(file.fileno(), _PAGE, page * _PAGE), total)
    return total


def _is_complete(path: Path) -> bool:
    """Whether a file was filled to its end and what finds its images is whole. A damaged one goes, with a warning."""
    tree = path.with_suffix(_TREE_SUFFIX)
    try:
        if not (path.is_file() and tree.is_file()):
            return False
        meta, arrays = open_arrays(tree)
        if meta["bytes"] != path.stat().st_size or meta["sum"] != _sum_of(path, arrays["pages"]):
            raise CacheError("damaged")
    except (CacheError, OSError) as error:
        get_logger().warning("--cache disk: %s cannot be used (%s); it is made anew", path, error)
        _remove(path)
        return False
    return True


def _remove(path: Path) -> None:
    """Removes a file with what vouches for it. Raises UserError where that cannot be."""
    for file in (path.with_suffix(_TREE_SUFFIX), path):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"--cache disk: {file}: cannot be removed ({error.strerror}); move it away") from None


def _stored(path: Path, count: int) -> np.ndarray:
    """Which of ``count`` images a file holds, bool (count,): none if there is no file, or a damaged one, which goes."""
    import lmdb

    held = np.zeros(count, bool)
    if _is_complete(path):
        return ~held
    tree = path.with_suffix(_TREE_SUFFIX)
    if tree.is_symlink() or tree.exists() or not path.is_file():  # of a file that has gone, or what is no file
        _remove(path)
        return held
    try:
        with contextlib.closing(lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False)) as environment:
            pages = environment.info()["last_pgno"] + 1
            if pages * environment.stat()["psize"] > path.stat().st_size:  # its pages would be read as SIGBUS
                raise lmdb.CorruptedError("truncated")
            with environment.begin() as transaction:
                keys = [key for key in transaction.cursor().iternext(keys=True, values=False) if len(key) == _KEY.size]
    except lmdb.Error as error:
        if "already open" in str(error):  # only complete files are kept open
            return ~held
        get_logger().warning("--cache disk: %s cannot be used (%s); it is made anew", path, error)
        _remove(path)
        return held
    held[[_KEY.unpack(key)[0] for key in keys]] = True
    return held


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
