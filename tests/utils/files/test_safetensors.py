"""The safetensors format: written files are read back, and headers that do not match the file are refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from models.weights.read import read_weights
from utils.errors import UserError
from utils.files.checkpoint import DTYPES, is_safetensors, read_safetensors, write_safetensors


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_layout_equals_the_published_one(tmp_path):
    tensors = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3).T, "a": torch.tensor([1, 2], dtype=torch.int8)}
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt", "name": "é"})
    content = (tmp_path / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt", "name": "é"}
    assert header == {"b": entry(0, 24, [3, 2]), "a": entry(24, 26, [2], "I8")}
    data = content[8 + length :]
    assert np.frombuffer(data[:24], "<f4").reshape(3, 2).tolist() == tensors["b"].tolist()
    assert data[24:] == b"\x01\x02"


def test_round_trip_of_every_type_and_of_odd_shapes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): (torch.rand(2, 3, generator=generator) * 9 - 3).to(dtype) for dtype in DTYPES} | {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "strided": (base := torch.rand(4, 4, generator=generator))[::2],
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


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": entry(0, 2**42, [2**40])}, bytes(8), "file not fully covered"),
        ({"w": entry(0, 8, [2**40])}, bytes(8), "invalid shape"),
        ({"w": entry(0, 16, [4])}, bytes(8), "file not fully covered"),
        ({"w": entry(4, 8, [1])}, bytes(8), "invalid offset for tensor `w`"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12), "invalid offset for tensor `b`"),
        ({"w": entry(0, 4, [1])}, bytes(8), "file not fully covered"),
        ({"w": entry(0, 4, [-1])}, bytes(4), "integer `-1`"),
        ({"w": entry(0, 4, [1.0])}, bytes(4), "floating point `1.0`"),
        ({"w": entry(0, 4, [1] * 17)}, bytes(4), "tensor 'w' is float32 of 17 dimensions, which no detector has"),
        ({"w": entry(-4, 0, [1])}, bytes(4), "integer `-4`"),
        ({"w": entry(True, 4, [1])}, bytes(4), "boolean `true`"),
        ({"w": {"dtype": "F32", "shape": [1]}}, bytes(4), "missing field `data_offsets`"),
        ({"w": 1}, b"", "integer `1`"),
        ({"w\nx": entry(4, 8, [1])}, bytes(8), "invalid offset for tensor `w x`"),
        ({"w": entry(0, 1, [1], "F8_E4M3")}, bytes(1), "tensor 'w' is float8_e4m3fn of 1 dimensions"),
        ({"w": entry(0, 8, [1], "C64")}, bytes(8), "tensor 'w' is complex64 of 1 dimensions"),
        ({"w": entry(0, 4, [1], ["F32"])}, bytes(4), "not a safetensors file"),
        ({"__metadata__": {"a": 1}}, b"", "not a safetensors file"),
        ([], b"", "not a safetensors file"),
        (b'{"w": ', b"", "not a safetensors file"),
        (b'{"a": 1, "a": 2}', b"", "not a safetensors file"),
        (b'{"a":' + b"[" * 100_000, b"", "recursion limit exceeded"),
        (b"{\xff}", b"", "not a safetensors file"),
    ],
)
def test_inconsistent_headers_are_refused(tmp_path, header, data, message):
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(UserError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x10", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 50) + b"{}"])
def test_inconsistent_lengths_are_refused(tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="truncated, damaged, or not a safetensors file"):
        read_safetensors(tmp_path / "bad.safetensors")
    with pytest.raises(UserError, match="no such checkpoint"):
        read_safetensors(tmp_path / "gone.safetensors")


def test_a_pipe_is_refused(tmp_path):
    """Opening it would block forever."""
    os.mkfifo(tmp_path / "x.safetensors")
    assert not is_safetensors(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="no such checkpoint"):
        read_weights(tmp_path / "x.safetensors")
