"""Stores arrays and plain data in one safetensors file with a checksum, which is memory-mapped when opened."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from utils.files.safe_io import atomic_write, open_descriptor, path_of_open

_KEY = "lockstep"  # metadata key that holds the checksum and the plain data, as JSON


class CacheError(Exception):
    """The file exists but is not a valid cache file. The message gives the reason."""


def write_arrays(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes ``path`` atomically. Raises OSError if that fails."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    content = save(arrays, {_KEY: json.dumps([_checksum(meta, arrays), meta])})
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, durable=True) as file:
        file.write(content)


def _checksum(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> int:
    layout = [(name, array.dtype.str, array.shape) for name, array in sorted(arrays.items())]
    total = zlib.crc32(json.dumps([meta, layout]).encode())
    for name, *_ in layout:
        total = zlib.crc32(arrays[name].data, total)
    return total


def open_arrays(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the metadata, and read-only arrays that are views of the memory-mapped file.

    Raises CacheError if the file is damaged or has another layout, OSError if it cannot be opened.
    """
    descriptor, _ = open_descriptor(path)
    try:
        with safe_open(path_of_open(descriptor) or path, "pt") as file:  # only PyTorch maps its arrays
            checksum, meta = json.loads(file.metadata()[_KEY])
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError, KeyError, ValueError, RuntimeError, MemoryError):
        raise CacheError("damaged, or not written by this version") from None
    finally:
        os.close(descriptor)
    for array in arrays.values():
        array.flags.writeable = False
    if checksum != _checksum(meta, arrays):
        raise CacheError("the contents are damaged")
    return meta, arrays
