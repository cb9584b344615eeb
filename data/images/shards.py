"""Reads images from shards: tar files, with one index of the image positions. `tools.shard` writes them.

The index, ``train.shards``, is stored next to the tar files, in the format of `utils.files.array_file`, whose CRC-32 is
verified when it is opened. The path of an image treats the index as a folder: ``SET/train.shards/images/a.jpg``. Each
read verifies the CRC-32 of the image.
"""

from __future__ import annotations

import bisect
import os
import zlib
from pathlib import Path

import numpy as np

from data.flat_strings import FlatStrings
from utils.errors import UserError
from utils.files.array_file import CacheError, open_arrays
from utils.files.safe_io import open_descriptor
from utils.machine.limits import raise_if_limit, require_posix

VERSION = 12  # increase it when the layout or the meaning of the arrays or the metadata changes
SUFFIX = ".shards"  # file name suffix of an index
SPAN = 1 << 40  # an image at byte b of shard s has the position s * SPAN + b
MEMBER_ARRAYS = {"position": np.int64, "size": np.int64, "crc": np.uint32, "by_path": np.int64}
# The index last opened for each path, so that a worker reads images with the index that its labels came from.
_opened: dict[Path, Shards] = {}


class Shards:
    """An open index."""

    def __init__(self, path: Path) -> None:
        """Opens the index at ``path``. Raises UserError if it cannot be read, is damaged or foreign, or was written by
        another version of this program."""
        require_posix(f"{path}: reading shards")
        self.path = path
        try:
            self.meta, self.arrays = open_arrays(path)
            version = self.meta["version"]
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except CacheError as error:
            raise UserError(f"{path}: not an index of shards ({error}); write it again") from None
        except (KeyError, TypeError):
            raise UserError(f"{path}: not an index of shards of this version; write it again") from None
        if version != VERSION:
            raise UserError(f"{path}: has version {version}, but this program reads {VERSION}; write it again")
        self.paths = self.strings("paths")

    def __len__(self) -> int:
        return len(self.paths)

    def strings(self, name: str) -> FlatStrings:
        """Returns the strings stored under ``name``."""
        return FlatStrings(self.arrays[f"{name}.data"], self.arrays[f"{name}.offsets"])

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
    shards = _opened[index] if index in _opened else open_shards(index)
    return shards.read(shards.find(os.fspath(Path(image).relative_to(index))))
