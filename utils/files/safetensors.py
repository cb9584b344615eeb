"""The safetensors format: a length, a JSON header that places each tensor, and the raw data. Nothing in it can run.

Format: https://huggingface.co/docs/safetensors. Little-endian; offsets are relative to the end of the header, and the
tensors fill the data without holes.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError
from utils.files.safe_io import open_regular, replacing

MAX_HEADER_BYTES = 64 * 2**20
MAX_DIMENSIONS = 16
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_safetensors(path: str | Path) -> bool:
    """Whether a file begins as one: a header length, then JSON. False for a missing file, and for a pipe."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{" and not start.startswith(b"PK")


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, on the CPU, and the file's metadata.

    Raises UserError, in one line that begins with the path, for a missing file and for whatever does not add up: every
    size is checked against the file before it is allocated.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    with open(path, "rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
        data_bytes = path.stat().st_size - 8 - length
        if not 2 <= length <= MAX_HEADER_BYTES or data_bytes < 0:
            raise UserError(f"{path}: truncated, or not a safetensors file")
        entries, metadata = _parse(file.read(length), path)
        expected, tensors = 0, {}
        for name, entry in sorted(entries.items(), key=lambda item: _offsets(item[1], path, item[0])):
            begin, end = _offsets(entry, path, name)
            dtype, shape = _described(entry, end - begin, path, name)
            if begin != expected or end > data_bytes:
                raise UserError(f"{path}: refused: tensor '{name}' does not match the data that is there")
            data, expected = bytearray(file.read(end - begin)), end
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(shape)
        if expected != data_bytes:
            raise UserError(f"{path}: refused: {data_bytes - expected} bytes belong to no tensor")
    return tensors, metadata


def write_safetensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replaces ``path`` whole. Tensors of the largest elements come first, so that each is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path, durable=True) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _parse(header: bytes, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        content = json.loads(header, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: truncated, or not a safetensors file (its header is no JSON)") from None
    metadata = content.pop("__metadata__", None) or {} if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UserError(f"{path}: refused: its header is not that of a safetensors file")
    return content, metadata


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _offsets(entry: Any, path: Path, name: str) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(v) for v in offsets):
        raise UserError(f"{path}: refused: tensor '{name}' has no place in the file")
    return offsets[0], offsets[1]


def _described(entry: dict[str, Any], size: int, path: Path, name: str) -> tuple[torch.dtype, list[int]]:
    shape = entry.get("shape")
    dtype = DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise UserError(f"{path}: tensor '{name}' is of type {entry.get('dtype')!r}, which is not known here")
    plain = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(_is_size(v) for v in shape)
    if not plain or math.prod(shape) * dtype.itemsize != size:
        raise UserError(f"{path}: refused: tensor '{name}' does not match the data that is there")
    return dtype, shape


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48
