"""Reads tensors from PyTorch files of other programs: a zip of raw storages and one pickle.

No code in the file is run: every class or function that the pickle names becomes an inert record, and tensors are made
from the records that describe them. torch compares their sizes with the storage, which is an entry of the file.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError, first_line
from utils.files.checkpoint_file import open_checkpoint, open_zip

MAX_OPCODES = 2_000_000  # each may create an object of a hundred times its size
OPCODES_REFUSED = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID"}  # torch never writes these
MAX_PICKLE_BYTES = 64 * 2**20
MAX_MODULES = MAX_TENSORS = 100_000  # records may contain each other
MAX_AMPLIFICATION = 16  # tensor bytes per file byte: float16 to float32, and some shared storages
STORAGE_DTYPES = {
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


class Record:
    """An object of a foreign class: its arguments and state, and no behavior. Each name gets a subclass.

    ``__setstate__`` on the class prevents the pickle's BUILD opcode from setting arbitrary attributes.
    """

    module = ""
    name = ""

    def __new__(cls, *args: Any, **_: Any) -> Record:
        record = super().__new__(cls)
        record.__dict__.update(args=args, state=None)
        return record

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def append(self, *_: Any) -> None:
        """Ignores the items of a subclass of list or, by `__setitem__`, of dict."""

    __setitem__ = append

    def get(self, key: str) -> Any:
        """An entry of the state, if that is a dict."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class _Mapping(dict):
    def __setstate__(self, state: Any) -> None:  # ignores the hooks and _metadata of an OrderedDict
        pass


_PLAIN = {
    ("collections", "OrderedDict"): _Mapping,
    ("builtins", "set"): list,  # members may be records, which cannot be hashed
    ("__builtin__", "set"): list,
    ("torch", "Size"): tuple,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _PLAIN.get((module, name)) or type("Named", (Record,), {"module": module, "name": name})

    def persistent_load(self, pid: Any) -> Any:
        """The record of a storage: its type's name, and its entry in the file."""
        match pid:
            case ("storage", type() as kind, str(key), *_) if issubclass(kind, Record):
                return Record(kind.name, key)
        raise pickle.UnpicklingError("it refers to data in an unknown way")


def load_inert(program: bytes) -> Any:
    """The object that a pickle describes: dicts, lists, plain values and `Record` objects. Raises
    pickle.UnpicklingError with the reason for anything that torch does not write."""
    try:
        # Opcodes that torch never writes, and memo slots beyond the program's length, which would allocate.
        highest, count = 0, 0
        for opcode, argument, _ in pickletools.genops(program):
            count += 1
            if count > MAX_OPCODES:
                raise pickle.UnpicklingError(f"its object graph has more than {MAX_OPCODES:,} parts")
            if opcode.name in OPCODES_REFUSED:
                raise pickle.UnpicklingError(f"its pickle has the opcode {opcode.name}, which PyTorch does not write")
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
                highest = max(highest, int(argument))
        if highest > count:
            raise pickle.UnpicklingError("its pickle refers to objects that it does not contain")
        return _Unpickler(io.BytesIO(program), encoding="latin1").load()
    except (RecursionError, MemoryError):
        raise pickle.UnpicklingError("its object graph is too deep or too large") from None
    except (EOFError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
        raise pickle.UnpicklingError("its object graph is malformed") from None


def is_module(value: Any) -> bool:
    return isinstance(value, Record) and isinstance(value.get("_modules"), dict)


class ForeignFile:
    """A PyTorch zip file, opened for reading data only: a context manager. Raises UserError, beginning with the path,
    for other files and for contradictions in the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open_checkpoint(path)
        try:
            self._zip = open_zip(self._file, path)
            self._sizes = {entry.filename: entry.file_size for entry in self._zip.infolist()}
            self._allowance = MAX_AMPLIFICATION * os.fstat(self._file.fileno()).st_size
            self.content = self._load()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ForeignFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _refuse(self, why: str) -> UserError:
        return UserError(f"{self.path}: refused: {why}")

    def _read(self, entry: str) -> bytes:
        try:
            return self._zip.read(entry)
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError, ValueError):
            raise UserError(f"{self.path}: damaged (entry {entry} cannot be read)") from None

    def _load(self) -> Any:
        pickles = [name for name in self._sizes if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise UserError(f"{self.path}: not a PyTorch checkpoint (no data.pkl inside)")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = self._folder + "byteorder"
        if order in self._sizes and self._read(order) != b"little":
            raise self._refuse("it was written on a big-endian machine")
        if self._sizes[pickles[0]] > MAX_PICKLE_BYTES:
            raise self._refuse(f"its object graph exceeds {MAX_PICKLE_BYTES >> 20} MiB")
        program = self._read(pickles[0])
        try:
            return load_inert(program)
        except pickle.UnpicklingError as error:
            raise self._refuse(first_line(error)) from None

    def tensor(self, value: Any) -> Tensor | None:
        """The tensor of a record, floating ones as float32; None for other values."""
        if _is_call(value, "_rebuild_parameter", "_rebuild_parameter_with_state") and value.args:
            value = value.args[0]
        if not _is_call(value, "_rebuild_tensor", "_rebuild_tensor_v2"):
            return None
        try:
            storage, offset, size, stride = value.args[:4]
            kind, key = storage.args
            dtype, entry = STORAGE_DTYPES[kind], f"{self._folder}data/{key}"
            flat = torch.frombuffer(bytearray(self._read(entry)), dtype=dtype) if self._sizes[entry] else torch.empty(0)
            view = flat.as_strided(size, stride, offset)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
            raise self._refuse("a tensor does not match the data that is there") from None
        self._allowance -= 8 * view.numel()
        if self._allowance < 0:
            raise self._refuse("its tensors declare far more data than the file has")
        return view.to(torch.float32 if dtype.is_floating_point else dtype, copy=True).contiguous()

    def state_dict(self, value: Any) -> dict[str, Tensor]:
        """Parameters and buffers by name, of a module record or a mapping from names to tensors."""
        if isinstance(value, dict):
            tensors = ((k, self.tensor(v)) for k, v in value.items() if isinstance(k, str))
        else:
            tensors = ((name, self.tensor(leaf)) for name, leaf in self._leaves(value))
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def modules(self, root: Any) -> Iterator[tuple[str, Record]]:
        """The module records in ``root``, itself first, with their dotted names; none if it is not a module."""
        pending, visited = [("", root)], 0
        while pending:
            name, module = pending.pop()
            visited += 1
            if visited > MAX_MODULES:
                raise self._refuse("its modules contain each other")
            if is_module(module):
                yield name, module
                children = list(module.get("_modules").items())
                pending.extend((f"{name}.{child}".lstrip("."), part) for child, part in reversed(children))

    def _leaves(self, root: Any) -> Iterator[tuple[str, Any]]:
        count = 0
        for prefix, module in self.modules(root):
            transient = module.get("_non_persistent_buffers_set")
            transient = transient if isinstance(transient, list) else []
            for group in ("_parameters", "_buffers"):
                leaves = module.get(group)
                for name, leaf in leaves.items() if isinstance(leaves, dict) else ():
                    count += 1
                    if count > MAX_TENSORS:
                        raise self._refuse(f"it has more than {MAX_TENSORS:,} tensors")
                    if name not in transient:
                        yield f"{prefix}.{name}".lstrip("."), leaf


def _is_call(value: Any, *functions: str) -> bool:
    return isinstance(value, Record) and value.module == "torch._utils" and value.name in functions
