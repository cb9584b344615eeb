"""Checkpoints and exported files that an attacker could have made, and what may stand where a file is expected."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn


def zip_around(program: bytes, path: Path, **entries: Any) -> Path:
    """Writes a file like those of `torch.save`, with ``program`` as its pickle. ``entries``: the bytes of storages."""
    with zipfile.ZipFile(path, "w") as file:
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
    """Returns a pickle that calls ``module.name(argument)``."""
    text = argument.encode()
    return b"\x80\x02c%s\n%s\nX%s%s\x85R." % (module.encode(), name.encode(), struct.pack("<I", len(text)), text)


def tensor_program(size: tuple, stride: tuple, count: int, offset: int = 0, key: str = "0") -> bytes:
    """Returns a pickled state dict of one tensor, whose sizes may be false."""

    storage = object()

    class Fake(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, key, "cpu", count) if value is storage else None

    buffer = io.BytesIO()
    arguments: tuple[object, ...] = (storage, offset, size, stride, False, OrderedDict())
    Fake(buffer, protocol=2).dump({"w": Touch((torch._utils._rebuild_tensor_v2, arguments))})
    return buffer.getvalue()


class Plus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Writer(nn.Module):
    """A TorchScript module that writes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        torch.save(torch.zeros(1), self.path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def write_hostile_programs(folder: Path, marker: Path) -> dict[str, Path]:
    """Writes an exported file of torch of each format. Returns them by format. Each creates ``marker`` when torch opens
    it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Plus(), (torch.zeros(2, 3),))
        torch.export.save(program, folder / "sound.pt2")
        torch.jit.save(torch.jit.script(Writer(str(marker))), folder / "a.torchscript")
    command = pickle.dumps(Touch((os.system, (f"touch {marker}",))), 2)
    with zipfile.ZipFile(folder / "sound.pt2") as sound, zipfile.ZipFile(folder / "a.pt2", "w") as hostile:
        for name in sound.namelist():
            hostile.writestr(f"archive/{name.partition('/')[2]}", sound.read(name))
        hostile.writestr("archive/data/weights/model.pt", command)  # where torch 2.8 had pickled weights
    return {"torchscript": folder / "a.torchscript", "pt2": folder / "a.pt2"}
