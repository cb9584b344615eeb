"""Reads and writes PyTorch and safetensors files. No file runs code when it is read.

A checkpoint of this program is plain tensors and plain data, which torch reads with ``weights_only=True``. A file of
another program is unpickled here, because `torch.load` also opens TorchScript archives, which run their own code: each
class that the pickle names becomes an inert `StandIn`, and only tensors are rebuilt.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from utils import program
from utils.errors import UserError, first_line, os_reason
from utils.files.safe_io import atomic_write, open_regular, path_of_open
from utils.machine.limits import raise_if_limit
from utils.schema import check

FORMAT = "lockstep"
VERSION = 2  # weights of earlier ones are read, but runs do not continue
_NOT_TORCH = "damaged, truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)"
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_CONTAINERS: dict[str, type] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "__builtin__.set": set,
    "__builtin__.frozenset": frozenset,
}


class CheckpointContent(TypedDict, total=False):
    """Types that every reader of a checkpoint can rely on. Weights-only files have only some of these keys; for
    resuming, `engine.train.checkpoint.Checkpoint` checks all of them."""

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
    """Replaces ``path`` atomically and durably. If it raises OSError, the old file is unchanged."""
    with atomic_write(path, durable=True) as file:
        try:
            torch.save({"format": FORMAT, "version": VERSION, "program": program.VERSION, **content}, file)
        except RuntimeError as error:  # raised by torch's zip writer while it handles the OSError of a failed write
            raise error.__context__ or error from None


def read_checkpoint(path: str | Path, *, verify: bool = True) -> dict[str, Any]:
    """Reads a checkpoint of this program, with its tensors mapped from the file. Raises UserError for any other file.

    ``verify`` compares the checksums of the whole file, which torch does not.
    """
    with open_checkpoint(path) as file:
        if verify:
            _check_sums(file, path)
        file.seek(0)
        # torch opens a path twice, and a training may replace the file in between, so it gets that of the open file.
        # Windows has no such paths; it could not replace a mapped file either, so there the file is read.
        mapped = path_of_open(file.fileno())
        try:
            content = torch.load(mapped or file, map_location="cpu", weights_only=True, mmap=bool(mapped))
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError, OSError) as error:
            raise_if_limit(error, path)
            raise UserError(f"{path}: not a checkpoint of this program, or damaged") from None
    return checked_content(content, path)


def checked_content(content: Any, path: str | Path) -> dict[str, Any]:
    """Returns the content of a checkpoint of this program. Raises UserError if it is none, or of a newer version."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this program")
    version = content.get("version", 0)
    if isinstance(version, int) and version > VERSION:
        raise UserError(f"{path}: written by a newer version (format {version}); update this program")
    return check(content, CheckpointContent, f"{path}: damaged checkpoint")


def _check_sums(file: BinaryIO, path: str | Path) -> None:
    try:
        wrong = zipfile.ZipFile(file).testzip()
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, ValueError) as error:
        raise_if_limit(error.__context__ or error, path)  # BadZipFile is also raised if the disk fails
        raise UserError(f"{path}: {_NOT_TORCH}") from None
    if wrong is not None:
        raise UserError(f"{path}: damaged checkpoint (the checksum of its entry {wrong} is wrong)")


def open_checkpoint(path: str | Path) -> BinaryIO:
    """Opens a checkpoint file. Raises UserError."""
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such checkpoint") from None
    except OSError as error:
        raise_if_limit(error, path)
        raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None


class StandIn:
    """An object of a class that is not imported: the name of the class, the arguments of its call, and its state.

    Items that the pickle adds to an instance of a container's subclass are dropped.
    """

    kind = ""  # module and name of the class or function
    args: tuple
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> StandIn:
        made = super().__new__(cls)
        made.args = args
        made.state = None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    def get(self, key: str) -> Any:
        """Returns an entry of the state if that is a dict, else None."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def read_any(path: str | Path) -> Any:
    """Reads a PyTorch file of any program: tensors, plain data, and a `StandIn` for each object of another class.
    Raises UserError for other files."""
    with open_checkpoint(path) as file:
        try:
            archive = zipfile.ZipFile(file)
            (program_entry,) = (name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"])
            folder = program_entry.removesuffix("data.pkl")
            with archive.open(program_entry) as pickled:
                return _Unpickler(pickled, lambda key: archive.read(f"{folder}data/{key}")).load()
        except zipfile.BadZipFile as error:
            raise_if_limit(error.__context__ or error, path)
            raise UserError(f"{path}: {_NOT_TORCH}") from None
        except MemoryError:
            raise UserError(f"{path}: damaged, or larger than the memory of this machine") from None
        except Exception as error:  # a pickle can raise any, since it is a program
            raise_if_limit(error, path)
            raise UserError(f"{path}: damaged, or not a PyTorch checkpoint ({first_line(error)[:200]})") from None


class _Unpickler(pickle.Unpickler):
    """Imports nothing that a pickle names. Everything that a pickle can call is created anew for it, because a pickle
    can also set attributes."""

    def __init__(self, program: Any, read_storage: Callable[[str], bytes]) -> None:
        super().__init__(program)
        self._read_storage = read_storage
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        kind = f"{module}.{name}"
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if kind in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: storage.as_strided(size, stride, offset)
        if kind in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return lambda data, *_: data
        return _CONTAINERS.get(kind) or type("StandIn", (StandIn,), {"kind": kind})

    def persistent_load(self, reference: Any) -> Tensor:
        """Returns a storage as a flat tensor, read once, because many tensors can be views of it."""
        _, dtype, key, *_ = reference
        if key not in self._storages:
            content = bytearray(self._read_storage(key))
            flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            self._storages[key] = flat
        return self._storages[key]


def is_safetensors(path: str | Path) -> bool:
    """Returns whether a file begins with a header length and JSON; False for a missing file or a pipe."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{" and not start.startswith(b"PK")


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors by name, on the CPU, and the metadata. Raises UserError for any other file."""
    with open_checkpoint(path) as opened:
        try:
            # The library takes names in UTF-8 only.
            with safe_open(path_of_open(opened.fileno()) or path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
                return tensors, file.metadata() or {}
        except (SafetensorError, MemoryError) as error:
            reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
            raise UserError(f"{path}: truncated, damaged, or not a safetensors file ({reason[:200]})") from None


def write_safetensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replaces ``path`` atomically with ``tensors`` and ``metadata``."""
    # The library refuses tensors that share memory or are not contiguous.
    copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    with atomic_write(path) as file:
        file.write(save(copies, metadata))
