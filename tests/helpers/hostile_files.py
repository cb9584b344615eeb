"""Checkpoints that an attacker, or an accident, could have made."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch


def zip_around(program: bytes, path: Path, compression: int = zipfile.ZIP_STORED, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", program)
        for name, data in entries.items():
            file.writestr(f"archive/data/{name}", data)
    return path


class Touch:
    """Creates a file when unpickled by `pickle`."""

    def __init__(self, command: tuple) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return self.command


def opcode_call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls ``module.name(argument)``."""
    text = argument.encode()
    return b"\x80\x02c%s\n%s\nX%s%s\x85R." % (module.encode(), name.encode(), struct.pack("<I", len(text)), text)


def tensor_program(size: tuple, stride: tuple, count: int, offset: int = 0, key: str = "0") -> bytes:
    """A state dict of one tensor, whose sizes may be false."""

    storage = object()

    class Fake(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, key, "cpu", count) if value is storage else None

    buffer = io.BytesIO()
    arguments = (storage, offset, size, stride, False, OrderedDict())
    Fake(buffer, protocol=2).dump({"w": Touch((torch._utils._rebuild_tensor_v2, arguments))})
    return buffer.getvalue()


def write_hostile_files(folder: Path, marker: Path) -> dict[str, tuple[Path, str]]:
    """One file of each kind, by kind, and the expected message. ``marker`` would be created if any of them ran."""
    command = Touch((os.system, (f"touch {marker}",)))
    torch.save({"model": {"w": torch.zeros(1000)}}, folder / "whole.pt")
    (folder / "truncated.pt").write_bytes((folder / "whole.pt").read_bytes()[:-300])
    (folder / "notes.pt").write_text("not a model\n" * 50)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "huge.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    (folder / "header.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    huge = zip_around(tensor_program((2**40,), (1,), 2**40), folder / "huge.pt", **{"0": bytes(24)})
    bomb = zip_around(pickle.dumps({}, 2), folder / "bomb.pt", zipfile.ZIP_DEFLATED, **{"0": bytes(2**23)})
    program = pickle.dumps({"model": command}, 2)
    (folder / "old.pt").write_bytes(program)
    return {
        "runs a command": (zip_around(program, folder / "runs.pt"), "refused: it asks for"),
        "bare pickle that runs a command": (folder / "old.pt", "truncated, or not a PyTorch checkpoint"),
        "huge tensor": (huge, "refused: a tensor does not match the data"),
        "huge tensor, safetensors": (folder / "huge.safetensors", "truncated, damaged, or not a safetensors file"),
        "huge header, safetensors": (folder / "header.safetensors", "truncated, damaged, or not a safetensors file"),
        "truncated": (folder / "truncated.pt", "truncated, or not a PyTorch checkpoint"),
        "zip bomb": (bomb, "refused: its entries are compressed"),
        "not a checkpoint": (folder / "notes.pt", "truncated, or not a PyTorch checkpoint"),
    }


TAKEN = ("bytes", "pipe", "link", "folder", "another user's")


def take_name(path: Path, kind: str, size: int = 0) -> None:
    """Puts something at ``path`` that another process could have put there: a file of ``size`` random bytes, ... A
    link leads to such a file beside it. Skips the test if another user's file needs root."""
    path.unlink(missing_ok=True)
    content = os.urandom(size)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        target = path.with_name("target")
        target.write_bytes(content)
        path.symlink_to(target)
    else:
        path.write_bytes(content)
        path.chmod(0o600)
    if kind == "another user's":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(path, 65534, 65534)
