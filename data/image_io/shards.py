"""Reads images from shards: tar files, with one index of the image positions. `tools.shard` writes them.

The index, ``train.shards``, is stored next to the tar files, in the format of `utils.files.array_file`. The path of an
image treats the index as a folder: ``SET/train.shards/images/a.jpg``. Each read verifies the image's checksum.
"""

from __future__ import annotations

import bisect
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np

from data.flat_strings import FlatStrings
from data.image_io.file_kinds import MAX_IMAGE_BYTES
from utils.errors import UserError
from utils.files.array_file import CacheError, open_arrays
from utils.files.safe_io import open_descriptor
from utils.machine.limits import raise_if_limit
from utils.schema import Bounds, check

SUFFIX = ".shards"  # file name suffix of an index
SPAN = 1 << 40  # an image at byte b of shard s has the position s * SPAN + b
# The index last opened for each path, so that a worker reads images with the index that its labels came from.
_opened: dict[Path, Shards] = {}
# Errors that a malformed index may raise while it is read and checked.
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
    shards: list[tuple[str, Annotated[int, Bounds(0, SPAN - 1)]]]  # file names and sizes in bytes


class Shards:
    """An open index."""

    def __init__(self, path: Path) -> None:
        """Opens the index at ``path``. Raises UserError if it cannot be read, or is malformed."""
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
        """Returns the strings stored under ``name``."""
        return FlatStrings(self.arrays[f"{name}.data"], self.arrays[f"{name}.offsets"])

    def _check(self) -> None:
        """Raises ValueError, or the error of a wrong type, for an index that points outside its shards."""
        arrays = self.arrays
        shards = check(self.meta, _Meta, "metadata")["shards"]
        require(all(array.flags.aligned for array in arrays.values()), "alignment")
        for name in {"paths", *(name.removesuffix(".data") for name in arrays if name.endswith(".data"))}:
            _check_strings(arrays, name)
        count = len(arrays["paths.offsets"]) - 1
        for name, dtype in MEMBER_ARRAYS.items():
            require(arrays[name].dtype == dtype and arrays[name].shape == (count,), name)
        for name, _ in shards:
            require(re.fullmatch(r"[\w-]{1,100}\.tar", name, re.ASCII) is not None, "name of a shard")
        _check_positions(arrays, np.array([size for _, size in shards], np.int64))
        require(np.array_equal(np.sort(arrays["by_path"]), np.arange(count)), "by_path")
        _check_paths(arrays)

    def find(self, name: str) -> int:
        """Returns the number of the image ``name``. Raises UserError if there is none."""
        # Items of a memoryview are Python's integers, which are faster than NumPy's.
        encoded_names = self.paths.data.data
        offsets = self.paths.offsets.data
        order = self.arrays["by_path"].data

        def encoded(i: int) -> bytes:
            return bytes(encoded_names[offsets[i] : offsets[i + 1]])

        wanted = name.encode("utf-8", "surrogateescape")
        at = bisect.bisect_left(order, wanted, key=encoded)
        if at == len(order) or encoded(order[at]) != wanted:
            raise UserError(f"{self.path}/{name}: no such image")
        return order[at]

    def read(self, i: int) -> bytes:
        """Returns the content of image i. Raises UserError if it cannot be read, or has another checksum, and OSError
        if the disk fails."""
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
            raise_if_limit(error, path)
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if len(data) != size or zlib.crc32(data) != int(self.arrays["crc"][i]):
            damage = f"bytes {start} to {start + size} are not those of {self.paths[i]}"
            raise UserError(f"{path}: {damage}; write it again")
        return data


def _check_strings(arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Raises ValueError unless the strings ``name`` are a valid `FlatStrings`."""
    data = arrays[f"{name}.data"]
    offsets = arrays[f"{name}.offsets"]
    require(data.dtype == np.uint8 and offsets.dtype == np.int64 and data.ndim == offsets.ndim == 1, name)
    require(len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(data), name)
    require(bool((np.diff(offsets) >= 0).all()), name)


def _check_positions(arrays: Mapping[str, np.ndarray], shard_sizes: np.ndarray) -> None:
    """Raises ValueError unless every image is inside a shard, in ascending order. ``shard_sizes``: int64, bytes."""
    shard, start = np.divmod(arrays["position"], SPAN)
    size = arrays["size"]
    require(bool((np.diff(arrays["position"]) > 0).all()), "position")
    require(bool(((shard >= 0) & (shard < len(shard_sizes))).all()), "number of a shard")
    is_inside = (size >= 0) & (size <= MAX_IMAGE_BYTES) & (start + size <= shard_sizes[shard])
    require(bool(is_inside.all()), "beyond its shard")


def _check_paths(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError if a path leads out of its folder."""
    encoded = arrays["paths.data"].tobytes()
    offsets = arrays["paths.offsets"]
    first_bytes = arrays["paths.data"][offsets[:-1][offsets[:-1] < len(encoded)]]
    # Splits the bytes into names only if one may be at fault, because an index may have millions of names.
    if b".." in encoded or b"//" in encoded or b"\0" in encoded or (first_bytes == ord("/")).any():
        names = (encoded[start:end] for start, end in zip(offsets.tolist(), offsets[1:].tolist()))
        require(not any(map(_leads_out, names)), "a path leads out of its folder")


def _leads_out(name: bytes) -> bool:
    parts = name.split(b"/")
    return b".." in parts or b"" in parts or b"\0" in name


def open_shards(path: Path) -> Shards:
    """Opens the index at ``path`` anew, also for later reads. Raises UserError."""
    _opened[path] = Shards(path)
    return _opened[path]


def is_shard_path(path: Path) -> bool:
    """Returns whether ``path`` has the suffix of an index of shards."""
    return path.suffix == SUFFIX


def shard_index(image: str | os.PathLike) -> Path | None:
    """Returns the index of shards that the path ``image`` leads through, or None for an image file.

    An image file costs one search in its path, without a system call.
    """
    if f"{SUFFIX}{os.sep}" not in os.fspath(image):
        return None
    parents = (parent for parent in Path(image).parents if is_shard_path(parent))
    return next((parent for parent in parents if parent in _opened or parent.is_file()), None)


def read_member(image: str | os.PathLike, index: Path) -> bytes:
    """Returns the content of an image in the shards of ``index``. Raises UserError or OSError; see `Shards.read`."""
    shards = _opened.get(index) or open_shards(index)
    return shards.read(shards.find(os.fspath(Path(image).relative_to(index))))


def require(condition: bool, message: str) -> None:
    """Raises ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)
