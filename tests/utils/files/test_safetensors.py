"""The safetensors format: written files are read back, and headers that do not match the file are refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from models.weights.read import read_weights
from tests.helpers.messages import refused
from utils.errors import UserError
from utils.files.checkpoint_file import (
    DTYPES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    is_safetensors,
    read_safetensors,
    write_safetensors,
)


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_round_trip_of_every_type_and_of_odd_shapes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): (torch.rand(2, 3, generator=generator) * 9 - 3).to(dtype) for dtype in DTYPES}
    base = torch.rand(4, 4, generator=generator)
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "strided": base[::2],
        "shared memory": base[1:],
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, {})
    assert is_safetensors(tmp_path / "x.safetensors")
    found, metadata = read_safetensors(tmp_path / "x.safetensors")
    assert metadata == {}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["u\udce9.safetensors", "folder \udce9/weights.safetensors"])
def test_a_file_whose_path_is_not_utf_8_is_read_back(tmp_path, name):
    """It was written, and then called damaged."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write_safetensors(path, {"weight": torch.arange(3)}, {"key": "value"})
    tensors, metadata = read_safetensors(path)
    assert tensors["weight"].tolist() == [0, 1, 2]
    assert metadata == {"key": "value"}


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"w": entry(0, 2**42, [2**40])}, bytes(8), "incomplete metadata, file not fully covered"),
        ({"w\nx": entry(4, 8, [1])}, bytes(8), "invalid offset for tensor `w x`"),
        ({"__metadata__": {"a": 1}}, b"", "invalid JSON in header: invalid type: integer `1`, expected a string ..."),
        (b'{"a":' + b"[" * 100_000, b"", "invalid JSON in header: recursion limit exceeded ..."),
        (None, b"", "header too small"),
        (None, b"\x10", "header too small"),
        (None, struct.pack("<Q", 2**63) + b"{}", "header too large"),
        (None, struct.pack("<Q", 50) + b"{}", "invalid header length"),
    ],
)
def test_inconsistent_headers_are_refused(tmp_path, header, data, reason):
    path = tmp_path / "bad.safetensors"
    if header is None:
        path.write_bytes(data)
    else:
        write_raw(path, header, data)
    with refused(f"bad.safetensors: truncated, damaged, or not a safetensors file ({reason})"):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("tensor", "data", "message"),
    [
        (entry(0, 4, [1] * 17), bytes(4), "float32, 17 dimensions"),
        (entry(0, 1, [1], "F8_E4M3"), bytes(1), "float8_e4m3fn, 1 dimension"),
    ],
)
def test_tensors_that_no_detector_has_are_refused(tmp_path, tensor, data, message):
    path = tmp_path / "bad.safetensors"
    write_raw(path, {"w": tensor}, data)
    with refused(f"bad.safetensors: refused: tensor 'w' has an unsupported type or shape ({message})"):
        read_safetensors(path)


@pytest.mark.parametrize("key", ["data_offsets", "data\\u005foffsets"])
def test_a_header_of_many_empty_tensors_is_refused_before_they_are_made(tmp_path, key):
    """Half a million take a minute and a half; JSON lets a key be written with escapes."""
    described = f'{{"dtype": "F32", "shape": [0], "{key}": [0, 0]}}'
    header = "{" + ", ".join(f'"{number}": {described}' for number in range(MAX_TENSORS + 1)) + "}"
    path = tmp_path / "many.safetensors"
    write_raw(path, header.encode(), b"")
    with pytest.raises(UserError, match=r"lists more tensors \(20,001\) than any detector has"):
        read_safetensors(path)


def test_a_header_as_large_as_no_detector_has_is_refused(tmp_path):
    path = tmp_path / "large.safetensors"
    write_raw(path, b" " * MAX_HEADER_BYTES + b"{}", b"")
    with pytest.raises(UserError, match="its header has more than 16 MiB, which no detector needs"):
        read_safetensors(path)


def test_a_pipe_is_refused(tmp_path):
    """Opening it would block forever."""
    os.mkfifo(tmp_path / "x.safetensors")
    assert not is_safetensors(tmp_path / "x.safetensors")
    with refused("x.safetensors: no such checkpoint"):
        read_weights(tmp_path / "x.safetensors")
    with refused("gone.safetensors: no such checkpoint"):
        read_safetensors(tmp_path / "gone.safetensors")
