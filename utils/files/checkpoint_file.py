"""Reads and writes checkpoint files (plain tensors and data, which load with ``weights_only=True``) and safetensors.

Files are replaced atomically. The sizes that a file declares are checked before anything is read or allocated.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from utils import program
from utils.errors import UserError, first_line
from utils.files.safe_io import atomic_write, open_regular
from utils.files.schema import check
from utils.machine.limits import explanation

FORMAT = "lockstep"
VERSION = 1  # of the format
_IS_FOLDER = 0x10  # among an entry's attributes
MAX_DIMENSIONS = 16
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class Stored(TypedDict, total=False):
    """What a checkpoint may hold, among other things."""

    version: int
    program: str
    model_spec: dict
    names: list[str]
    imgsz: int
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict
    scaler: dict
    progress: dict
    run: dict
    config: dict
    hyp: dict
    data: dict
    metrics: dict
    origin: dict


def write_checkpoint(content: dict[str, Any], path: str | Path) -> None:
    """Replaces ``path`` atomically and durably. If that raises OSError (a full disk), the old file is unchanged."""
    with atomic_write(path, durable=True) as file:
        try:
            torch.save({"format": FORMAT, "version": VERSION, "program": program.VERSION, **content}, file)
        except RuntimeError as error:  # of torch's zip writer, while it handles the OSError of a failed write
            raise error.__context__ or error from None


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU, read without running its code. Raises UserError for any other file."""
    with open_checkpoint(path) as file:
        _check_sums(file, path)
        content = _load(file, path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this program")
    content = check(content, Stored, f"{path}: damaged checkpoint")
    for name, tensor in {**content.get("model", {}), **(content.get("ema") or {})}.items():
        if tensor.layout != torch.strided:
            raise UserError(f"{path}: damaged checkpoint: '{name[:100]}' is not a dense tensor")
    if content.get("version", 0) > VERSION:
        raise UserError(f"{path}: written by a newer version (format {content['version']}); update this program")
    return content


def open_checkpoint(path: str | Path) -> BinaryIO:
    """Opens a checkpoint once for all that is read of it, since a training process may replace the file meanwhile."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        return open_regular(path)
    except OSError as error:
        _raise_if_limit(error, path)
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _load(file: BinaryIO, path: str | Path) -> Any:
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about unusual tensors, which `read_checkpoint` refuses
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path}: not a checkpoint of this program (it holds foreign objects)") from None
    except Exception as error:  # the unpickler raises any type for malformed data
        _raise_if_limit(error, path)
        raise UserError(f"{path}: damaged checkpoint ({first_line(error)})") from None


def _check_sums(file: BinaryIO, path: str | Path) -> None:
    """Raises UserError if an entry's checksum, which torch ignores, is wrong."""
    with open_zip(file, path) as archive:
        try:
            wrong = archive.testzip()
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError) as error:
            _raise_if_limit(error, path)
            raise UserError(f"{path}: damaged checkpoint ({str(error)[:100]})") from None
        if wrong is not None:
            raise UserError(f"{path}: damaged checkpoint (the checksum of its entry {wrong[:100]} is wrong)")


def open_zip(file: BinaryIO, path: str | Path) -> zipfile.ZipFile:
    """The zip archive in the file of `open_checkpoint`, which the caller closes. PyTorch stores entries uncompressed,
    so together they cannot exceed the file. Raises UserError for anything else."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        # zipfile raises BadZipFile also if reading fails.
        _raise_if_limit(error if isinstance(error, OSError) else error.__context__ or error, path)
        raise UserError(f"{path}: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)") from None
    entries = archive.infolist()
    why = ""
    if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
        why = "its entries are compressed, but PyTorch's never are"
    elif any(not e.filename or e.is_dir() or e.external_attr & _IS_FOLDER for e in entries):  # torch reads nothing
        why = "it holds folders or entries without a name"
    elif min((e.header_offset for e in entries), default=0):  # torch would read that data, which is not checked here
        why = "there is data before the archive"
    elif len({e.filename for e in entries}) < len(entries):
        why = "two of its entries have the same name"
    elif sum(e.file_size for e in entries) > os.fstat(file.fileno()).st_size:
        why = "its entries declare more data than the file has"
    if why:
        raise UserError(f"{path}: refused: {why}")
    return archive


def _raise_if_limit(error: BaseException, path: str | Path) -> None:
    """Raises ``error`` if its cause is a limit of the machine (`explanation`), not the file."""
    if explanation(error):
        if isinstance(error, OSError):
            error.filename = str(path)
        raise error


def is_safetensors(path: str | Path) -> bool:
    """Whether a file begins with a header length and JSON; False for a missing file or a pipe."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{" and not start.startswith(b"PK")


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by name, on the CPU, and the metadata. Raises UserError for a damaged file, and for tensors of types
    or dimensions that no detector has."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
            metadata = file.metadata() or {}
    except (SafetensorError, MemoryError) as error:
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise UserError(f"{path}: truncated, damaged, or not a safetensors file ({reason[:200]})") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
            kind = f"{tensor.dtype} of {tensor.dim()} dimensions".removeprefix("torch.")
            raise UserError(f"{path}: refused: tensor {name[:100]!r} is {kind}, which no detector has")
    return tensors, metadata


def write_safetensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    # The library refuses tensors that share memory or are not contiguous.
    copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    with atomic_write(path) as file:
        file.write(save(copies, metadata))
