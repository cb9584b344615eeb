"""The safetensors format, in which nothing can run, read and written with the library of that name.

Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from utils.errors import UserError
from utils.files.safe_io import atomic_write, open_regular

MAX_DIMENSIONS = 16
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


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

    Raises UserError, in one line that begins with the path, for a missing file and for a header that does not match
    the file: the library checks every size before it allocates anything.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            metadata = file.metadata() or {}
    except SafetensorError as error:
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise UserError(f"{path}: truncated, damaged, or not a safetensors file ({reason[:200]})") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
            kind = f"{tensor.dtype} of {tensor.dim()} dimensions".removeprefix("torch.")
            raise UserError(f"{path}: refused: tensor {name[:100]!r} is {kind}, which no detector has")
    return tensors, metadata


def write_safetensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replaces ``path`` atomically."""
    # The library refuses tensors that share memory or are not contiguous.
    copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    with atomic_write(path) as file:
        file.write(save(copies, metadata))
