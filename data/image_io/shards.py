"""Images in shards: tar files, and one index that says where in them each image is. `tools.shard` writes them.

The index, ``train.shards``, is a file of `utils.files.array_file`, next to the tar files. An image is addressed as if
the index were a folder: ``SET/train.shards/images/a.jpg``. Its checksum is verified whenever it is read.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np

from utils.errors import UserError
from utils.files.array_file import CacheError, open_arrays
from utils.files.safe_io import open_descriptor
from utils.files.schema import Bounds, check
from utils.strings import FlatStrings

SUFFIX = ".shards"  # of an index
SPAN = 1 << 40  # an image at byte b of shard s has the position s * SPAN + b
MOST_BYTES = 1 << 31  # of an image
_opened: dict[Path, Shards] = {}  # the last one of each path: a worker reads with the index of its labels
_MALFORMED = (
    CacheError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
MEMBER_ARRAYS = {"position": np.int64, "size": np.int64, "crc": np.uint32, "by_path": np.int64}


class _Meta(TypedDict):
    fingerprint: str
    shards: list[tuple[str, Annotated[int, Bounds(0, SPAN - 1)]]]  # names and bytes


class Shards:
    """An open index."""

    def __init__(self, path: Path) -> None:
        """Raises UserError."""
        self.path = path
        try:
            self.meta, self.arrays = open_arrays(path)
            self._check()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except (UserError, *_MALFORMED) as error:
            raise UserError(f"{path}: not an index of shards ({error}); write it again") from None
        self.paths = self.strings("paths")

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
        begins = arrays["paths.data"][starts[:-1][starts[:-1] < len(text)]]
        if b".." in text or b"//" in text or b"\0" in text or (begins == ord("/")).any():
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
        size = int(self.arrays["size"][i])
        path = self.path.with_name(self.meta["shards"][shard][0])
        try:
            handle, status = open_descriptor(path)
            try:
                data = os.pread(handle, max(min(size, status.st_size - start), 0), start)
            finally:
                os.close(handle)
        except FileNotFoundError:
            raise UserError(f"{path}: not found (named by {self.path})") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if len(data) != size or zlib.crc32(data) != int(self.arrays["crc"][i]):
            text = f"bytes {start} to {start + size} are not those of {self.paths[i]}; write it again"
            raise UserError(f"{path}: {text}")
        return data


def fingerprint_of(arrays: Mapping[str, np.ndarray]) -> str:
    """32 hex digits, of the labels, the paths and the checksums of the images."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def open_shards(path: Path) -> Shards:
    """The index at ``path``, opened anew. Raises UserError."""
    _opened[path] = Shards(path)
    return _opened[path]


def is_shard_path(path: Path) -> bool:
    """Whether ``path`` is called like an index of shards."""
    return path.suffix == SUFFIX


def shard_index(image: str | os.PathLike) -> Path | None:
    """The index of shards below which ``image`` is addressed; None for an image file."""
    if f"{SUFFIX}{os.sep}" not in os.fspath(image):
        return None
    parents = (parent for parent in Path(image).parents if is_shard_path(parent))
    return next((parent for parent in parents if parent in _opened or parent.is_file()), None)


def read_member(image: str | os.PathLike, index: Path) -> bytes:
    """The content of an image in the shards of ``index``. Raises UserError."""
    shards = _opened.get(index) or open_shards(index)
    return shards.read(shards.find(os.fspath(Path(image).relative_to(index))))


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)
