"""Images in shards: tar files, and one index that says where in them each image is.

The index, ``train.shards``, is a file of `utils.files.array_file`. An image is addressed as if the index were a folder:
``SET/train.shards/images/a.jpg``. The tar files are next to the index, or in the store that its folder mirrors
(`utils.store.client`). From a store, blocks of several images are read into the local cache, if all shards fit into it,
or else single images. The checksum of an image is verified whenever it is read.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import os
import re
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np

from utils.errors import UserError
from utils.files.array_file import CacheError, open_arrays
from utils.files.caches import cache_limit
from utils.files.safe_io import make_own_folder, open_descriptor
from utils.files.schema import Bounds, check
from utils.store.address import MIRRORS, SHARDS
from utils.store.client import fetch, forget, refresh
from utils.strings import FlatStrings

SPAN = 1 << 40  # an image at byte b of shard s has the position s * SPAN + b
BLOCK = 1 << 23  # bytes of positions that are read at once from a store; SPAN is a multiple
MOST_BYTES = 1 << 31  # of an image
_TRIES = 3  # to read an image with the right checksum
_TOUCHED_S = 60.0  # the last use of a cached block is recorded this exactly
_last: dict[Path, Shards] = {}  # the one that was opened last, by path: a worker reads with the index of its labels
_MALFORMED = (
    CacheError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
MEMBER_ARRAYS = {"position": np.int64, "size": np.int64, "crc": np.uint32, "by_path": np.int64}


class _Meta(TypedDict):
    fingerprint: str
    shards: list[tuple[str, Annotated[int, Bounds(0, SPAN - 1)]]]  # names and bytes


class Shards:
    """An open index."""

    def __init__(self, path: Path, limit: float = 0) -> None:
        """``limit``: of the local cache, bytes. Raises UserError if ``path`` is missing or not a valid index."""
        self.path, self._origin = path, MIRRORS.get(path.parent, "")
        try:
            self.meta, self.arrays = open_arrays(path, own=bool(self._origin))
            self._check()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except (UserError, *_MALFORMED) as error:
            forget(path)
            raise UserError(f"{path}: not an index of shards ({error}); write it again") from None
        self.paths = self.strings("paths")
        if self._origin:
            key = hashlib.blake2b(f"{self._origin}\0{self.meta['fingerprint']}".encode(), digest_size=12).hexdigest()
            self._cache, self._limit = path.parents[1] / "blocks" / key, max(int(limit), 1)
            self._in_blocks = sum(size for _, size in self.meta["shards"]) <= limit / 2
            try:
                for folder in (self._cache.parent, self._cache):
                    make_own_folder(folder)
            except OSError as error:
                raise UserError(f"{error.filename}: {str(error.strerror).lower()}; use another --cache-dir") from None

    def __len__(self) -> int:
        return len(self.paths)

    def strings(self, name: str) -> FlatStrings:
        return FlatStrings(self.arrays[f"{name}.data"], self.arrays[f"{name}.offsets"])

    def _check(self) -> None:
        """Raises ValueError, or what wrong types raise, for an index that would lead out of its shards."""
        arrays, shards = self.arrays, check(self.meta, _Meta, "metadata")["shards"]
        _require(all(array.flags.aligned for array in arrays.values()), "alignment")
        for name in ("paths", "report", *(["image_ids"] if "image_ids.data" in arrays else [])):
            data, offsets = arrays[f"{name}.data"], arrays[f"{name}.offsets"]
            _require(data.dtype == np.uint8 and offsets.dtype == np.int64 and data.ndim == offsets.ndim == 1, name)
            _require(len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(data), name)
            _require(bool((np.diff(offsets) >= 0).all()), name)
        count = len(arrays["paths.offsets"]) - 1
        for name, dtype in MEMBER_ARRAYS.items():
            _require(arrays[name].dtype == dtype and arrays[name].shape == (count,), name)
        for name, _ in shards:
            _require(re.fullmatch(r"[\w-]{1,100}\.tar", name, re.ASCII) is not None, "name of a shard")
        shard, start = np.divmod(arrays["position"], SPAN)
        size, ends = arrays["size"], np.array([size for _, size in shards], np.int64)
        _require(bool((np.diff(arrays["position"]) > 0).all()), "position")
        _require(bool(((shard >= 0) & (shard < len(ends))).all()), "number of a shard")
        _require(bool(((size >= 0) & (size <= MOST_BYTES) & (start + size <= ends[shard])).all()), "beyond its shard")
        _require(np.array_equal(np.sort(arrays["by_path"]), np.arange(count)), "by_path")
        text = arrays["paths.data"].tobytes()
        starts = arrays["paths.offsets"]
        if b".." in text or b"//" in text or b"\0" in text or b"/" in text[:1] or _starts_with_slash(text, starts):
            names = (text[a:b] for a, b in zip(starts.tolist(), starts[1:].tolist()))
            is_outside = any({b"..", b""} & set(name.split(b"/")) or b"\0" in name for name in names)
            _require(not is_outside, "a path leads out of its folder")
        # Caches of pixels are found by it: another would let one data set put its images in place of another's.
        _require(self.meta["fingerprint"] == fingerprint_of(arrays), "fingerprint")

    def find(self, name: str) -> int:
        """The number of the image ``name``. Raises UserError if there is none."""
        text, ends = memoryview(self.paths.data), memoryview(self.paths.offsets)  # their items are Python's

        def encoded(i: int) -> bytes:
            return bytes(text[ends[i] : ends[i + 1]])

        wanted, order = name.encode("utf-8", "surrogateescape"), memoryview(self.arrays["by_path"])
        at = bisect.bisect_left(order, wanted, key=encoded)
        if at == len(order) or encoded(order[at]) != wanted:
            raise UserError(f"{self.path}/{name}: no such image")
        return order[at]

    def read(self, i: int) -> bytes:
        """The content of image i. Raises UserError."""
        shard, start = divmod(int(self.arrays["position"][i]), SPAN)
        size, crc = int(self.arrays["size"][i]), int(self.arrays["crc"][i])
        name = self.meta["shards"][shard][0]
        for attempt in range(_TRIES):
            data = self._read(i, name, shard, start, size, again=attempt > 0)
            if len(data) == size and zlib.crc32(data) == crc:
                return data
        source = f"{self._origin}/{name}" if self._origin else self.path.with_name(name)
        raise UserError(f"{source}: bytes {start} to {start + size} are not those of {self.paths[i]}; write it again")

    def _read(self, i: int, name: str, shard: int, start: int, size: int, *, again: bool) -> bytes:
        if not self._origin:
            path = self.path.with_name(name)
            try:
                return _part(open_descriptor(path)[0], start, size)
            except FileNotFoundError:
                raise UserError(f"{path}: not found (named by {self.path})") from None
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        first, stop = self._block(i, shard, start, size)
        path = self._cache / f"{shard:05d}-{first}-{stop}"
        with contextlib.suppress(FileNotFoundError):
            if not again:
                handle, status = open_descriptor(path)
                if time.time() - status.st_mtime > _TOUCHED_S:
                    os.utime(handle)
                return _part(handle, start - first, size)
        handle = fetch(f"{self._origin}/{name}", path, first, stop, again=again, limit=self._limit)
        return _part(handle, start - first, size)

    def _block(self, i: int, shard: int, start: int, size: int) -> tuple[int, int]:
        """The bytes of a shard that are read with image i."""
        if not self._in_blocks:
            return start, start + size
        positions, begin = self.arrays["position"], shard * SPAN + start // BLOCK * BLOCK
        first, end = np.searchsorted(positions, (begin, begin + BLOCK)).tolist()
        stop = positions[end - 1] + self.arrays["size"][end - 1]
        return int(positions[first]) - shard * SPAN, int(stop) - shard * SPAN


def fingerprint_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Of the labels, the paths and the checksums of the images: 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def open_shards(path: Path) -> Shards:
    """The index at ``path``, opened once per process. Raises UserError."""
    try:
        status = path.stat()
    except OSError:
        raise UserError(f"{path}: no such file") from None
    _last[path] = _opened(path, status.st_mtime_ns, status.st_ino)
    return _last[path]


@functools.lru_cache(maxsize=8)
def _opened(path: Path, *_: Any) -> Shards:
    if path.parent not in MIRRORS:
        return Shards(path)
    limit = cache_limit(path.parent)
    with contextlib.suppress(UserError):
        return Shards(path, limit)
    refresh(path)  # the copy may be damaged, and has been forgotten
    return Shards(path, limit)


def read_member(path: str | os.PathLike) -> bytes:
    """The content of an image in shards. Raises UserError."""
    text = os.fspath(path)
    ends = [match.end() for match in re.finditer(re.escape(SHARDS) + "/", text)]
    end = next((end for end in ends if os.path.isfile(text[: end - 1])), 0)
    if not end:
        raise UserError(f"{text}: no such image")
    path = Path(text[: end - 1])
    shards = _last.get(path) or open_shards(path)
    return shards.read(shards.find(text[end:]))


def _part(handle: int, start: int, size: int) -> bytes:
    """Bytes of an open file, which is closed."""
    try:
        return os.pread(handle, max(min(size, os.fstat(handle).st_size - start), 0), start)
    finally:
        os.close(handle)


def _starts_with_slash(text: bytes, starts: np.ndarray) -> bool:
    begins = starts[:-1][starts[:-1] < len(text)]
    return bool((np.frombuffer(text, np.uint8)[begins] == ord("/")).any())


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)
