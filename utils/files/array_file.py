"""Arrays in one file: a small JSON header and aligned raw bytes, opened memory-mapped, without pickle.

Layout: magic (8 bytes), header length and CRC-32 of header and of everything after it (3 x uint32, little-endian), the
header (UTF-8 JSON: ``meta``, and name, dtype, shape and offset of each array), and the arrays, each at a multiple of 64
bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from utils.files.checked_open import open_file, open_own
from utils.files.safe_io import atomic_write

_MAGIC = b"LKSTIDX1"
_FIXED = struct.Struct("<8sIII")
_ALIGN = 64
_MOST_HEADER = 1 << 28


class CacheError(Exception):
    """The file exists but is not a valid cache file; the message says what is wrong."""


def write_arrays(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes ``path`` atomically and removes temporary files that killed processes left. Raises OSError."""
    blocks, directory, at = [], {}, 0
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        directory[name] = [array.dtype.str, list(array.shape), at]
        padding = -array.nbytes % _ALIGN
        blocks += [array.tobytes(), bytes(padding)]
        at += array.nbytes + padding
    header = json.dumps({"meta": meta, "arrays": directory, "bytes": at}).encode()
    header += b" " * (-(len(header) + _FIXED.size) % _ALIGN)
    body_crc = 0
    for block in blocks:
        body_crc = zlib.crc32(block, body_crc)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, durable=True, locked=True) as file:
        file.write(_FIXED.pack(_MAGIC, len(header), zlib.crc32(header), body_crc))
        file.write(header)
        file.writelines(blocks)


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Reads the header. Returns it and the CRC-32 of the rest of ``file``."""
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise CacheError("too short")
    magic, length, header_crc, body_crc = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise CacheError("not written by this version")
    if length > _MOST_HEADER:
        raise CacheError("the header is too long")
    raw = file.read(length)
    if zlib.crc32(raw) != header_crc:
        raise CacheError("the header is damaged")
    return json.loads(raw), body_crc


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the metadata without reading the arrays. Raises as `open_arrays` does."""
    with open(path, "rb", opener=open_own) as file:
        return _read_header(file)[0]["meta"]


def open_arrays(path: Path, *, own: bool = True) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the metadata, and read-only arrays that are views of the mapped file.

    Raises CacheError if the file is damaged or has another layout, OSError if it cannot be opened, or with ``own``
    belongs to another user.
    """
    with open(path, "rb", opener=open_own if own else open_file) as file:
        header, body_crc = _read_header(file)
        start = file.tell()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(mapped) - start != header["bytes"]:
        raise CacheError("truncated")
    with memoryview(mapped) as view, view[start:] as body:
        if zlib.crc32(body) != body_crc:
            raise CacheError("the contents are damaged")
    arrays = {}
    for name, (dtype, shape, at) in header["arrays"].items():
        count = math.prod(map(operator.index, shape))
        flat = np.frombuffer(mapped, dtype, count, start + at) if count else np.empty(0, dtype)
        arrays[name] = flat.reshape(shape)
    return header["meta"], arrays
