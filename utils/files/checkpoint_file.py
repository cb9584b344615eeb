"""Reads and writes checkpoint files (plain tensors and data, which load with ``weights_only=True``) and safetensors.

Files are replaced atomically. The sizes that a file declares are checked before anything is read or allocated.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from utils import program
from utils.errors import UserError
from utils.files.safe_io import atomic_write, open_regular
from utils.files.torch_file import MAX_DIMENSIONS, TorchFile
from utils.schema import check
from utils.strings import counted

FORMAT = "lockstep"
VERSION = 1
MAX_PARTS = 2_000_000  # values, lists and so on in a checkpoint's content
CHARACTERS_PER_PART = 64  # a longer string counts as several parts
MAX_TENSORS = 20_000  # maximum number in a safetensors file
MAX_HEADER_BYTES = 16 * 2**20  # size limit for the header of a safetensors file
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class CheckpointContent(TypedDict, total=False):
    """Types that every reader of a checkpoint can rely on. Weights-only files have only some of these keys; for
    resuming, `engine.checkpoint.checkpoint.Checkpoint` checks all of them."""

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
    """Replaces ``path`` atomically and durably. If it raises OSError (a full disk), the old file is unchanged."""
    with atomic_write(path, durable=True) as file:
        try:
            torch.save({"format": FORMAT, "version": VERSION, "program": program.VERSION, **content}, file)
        except RuntimeError as error:  # raised by torch's zip writer while it handles the OSError of a failed write
            raise error.__context__ or error from None


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint to the CPU, without running code in it. Raises UserError for any other file."""
    with TorchFile(path) as file:
        return checkpoint_in(file)


def checkpoint_in(file: TorchFile) -> dict[str, Any]:
    """Returns the content of an open file, as `read_checkpoint` does."""
    file.check_sums()
    content = _ContentReader(file).read(_content_of(file))
    return check(content, CheckpointContent, f"{file.path}: damaged checkpoint")


def read_part(path: str | Path, name: str, *, check_sums: bool = True) -> Any:
    """Returns the part ``name`` of a checkpoint, such as "progress", or None if it has no such part.

    The other arguments and errors are those of `read_parts`.
    """
    return read_parts(path, [name], check_sums=check_sums).get(name)


def read_parts(path: str | Path, names: Collection[str], *, check_sums: bool = True) -> dict[str, Any]:
    """Returns those of the parts ``names`` that a checkpoint has, by name.

    Tensors of other parts are not kept in memory. Raises UserError if the file is damaged or not a checkpoint. With
    ``check_sums``, the whole file is read, to detect damaged tensors of other parts too.
    """
    with TorchFile(path) as file:
        if check_sums:
            file.check_sums()
        content = _content_of(file)
        return _ContentReader(file).read({name: content[name] for name in names if name in content})


def _content_of(file: TorchFile) -> dict[Any, Any]:
    """Returns the content of an open file, with `Record` objects in place of tensors."""
    content = file.content
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{file.path}: not a checkpoint of this program")
    version = content.get("version", 0)
    if isinstance(version, int) and version > VERSION:
        raise UserError(f"{file.path}: written by a newer version (format {version}); update this program")
    return content


class _Converted(NamedTuple):
    """A part of a checkpoint's content with its tensors."""

    value: Any
    size: int  # number of its parts, itself included


class _ContentReader:
    """Replaces records with tensors in a file's content, or in a part of it.

    The number of parts is bounded. Shared parts count each time, because copying or printing expands them: ten nested
    lists that each contain the next one ten times are small in the file.
    """

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._converted: dict[int, _Converted] = {}  # by the identity of a part in the file

    def read(self, content: Any) -> Any:
        """Returns the content with its tensors. Raises UserError for objects that our checkpoints never contain."""
        try:
            return self._read(content).value
        except RecursionError:
            raise self._file.refuse("its content is nested too deeply") from None

    def _read(self, part: Any) -> _Converted:
        if part is None or isinstance(part, bool | int | float):
            return _Converted(part, 1)
        if isinstance(part, str):
            return _Converted(part, 1 + len(part) // CHARACTERS_PER_PART)
        if id(part) not in self._converted:
            self._converted[id(part)] = _Converted(part, MAX_PARTS + 1)  # seen only if the part contains itself
            self._converted[id(part)] = self._read_container(part)
        converted = self._converted[id(part)]
        if converted.size > MAX_PARTS:
            raise self._file.refuse(f"its content has more than {MAX_PARTS:,} parts, or contains itself")
        return converted

    def _read_container(self, part: Any) -> _Converted:
        if isinstance(part, dict) and all(isinstance(key, str | int) for key in part):
            values = [self._read(value) for value in part.values()]
            return _Converted(dict(zip(part, (converted.value for converted in values))), _size_of(values))
        if isinstance(part, list | tuple):
            items = [self._read(item) for item in part]
            return _Converted(type(part)(item.value for item in items), _size_of(items))
        tensor = self._file.view(part)
        if tensor is None:
            raise UserError(f"{self._file.path}: not a checkpoint of this program (it holds foreign objects)")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise self._file.refuse("it repeats one value instead of storing a tensor")
        return _Converted(tensor, 1)


def _size_of(items: list[_Converted]) -> int:
    """Returns the size of a container of ``items``."""
    return 1 + sum(item.size for item in items)


def is_safetensors(path: str | Path) -> bool:
    """Returns whether a file begins with a header length and JSON; False for a missing file or a pipe."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{" and not start.startswith(b"PK")


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors by name, on the CPU, and the metadata. Raises UserError for a damaged file, and for tensors
    whose type or number of dimensions no detector has."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        with open_regular(path) as opened:
            _check_header(opened, path)
            # The file whose header was checked, and whatever its name, which the library wants as UTF-8.
            with safe_open(f"/dev/fd/{opened.fileno()}", "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
                metadata = file.metadata() or {}
    except (SafetensorError, MemoryError) as error:
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise UserError(f"{path}: truncated, damaged, or not a safetensors file ({reason[:200]})") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
            kind = f"{tensor.dtype}, {counted(tensor.dim(), 'dimension')}".removeprefix("torch.")
            raise UserError(f"{path}: refused: tensor {name[:100]!r} has an unsupported type or shape ({kind})")
    return tensors, metadata


def _check_header(file: BinaryIO, path: str | Path) -> None:
    """Raises UserError if the safetensors ``file`` at ``path`` lists more tensors than any detector has. The header is
    parsed as JSON, not searched, because JSON can spell a key in many ways. Malformed headers are left to the
    library."""
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, MAX_HEADER_BYTES + 1))
    if len(header) > MAX_HEADER_BYTES:
        raise UserError(
            f"{path}: refused: its header has more than {MAX_HEADER_BYTES >> 20} MiB, which no detector needs"
        )
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        return
    count = len(entries.keys() - {"__metadata__"}) if isinstance(entries, dict) else 0
    if count > MAX_TENSORS:
        raise UserError(f"{path}: refused: it lists more tensors ({count:,}) than any detector has")


def write_safetensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    # The library refuses tensors that share memory or are not contiguous.
    copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    with atomic_write(path) as file:
        file.write(save(copies, metadata))
