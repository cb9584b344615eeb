"""Reads tensors from PyTorch files of other programs: a zip of raw storages and one pickle.

No code in the file is run: every class or function that the pickle names becomes an inert record. Sizes are checked
against the file before anything is allocated.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError, first_line
from utils.files.checkpoint import open_checkpoint, open_zip

MAX_OPCODES = 2_000_000  # each may create an object of a hundred times its size
OPCODES_REFUSED = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID"}  # torch never writes these
PLAIN_STDLIB = {  # plain data in public checkpoints by module, kept as inert records like everything else
    "_codecs": {"encode"},
    "argparse": {"Namespace"},
    "builtins": {"bytearray", "complex", "slice", "frozenset"},
    "collections": {"defaultdict"},
    "datetime": {"date", "datetime", "timedelta"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "types": {"SimpleNamespace"},
}
TORCH_FUNCTIONS = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state"}


class Record:
    """An object of a foreign class: its arguments and state, and no behavior. Each name gets a subclass.

    ``__setstate__`` on the class prevents the pickle's BUILD opcode from setting arbitrary attributes.
    """

    module = ""
    name = ""

    def __new__(cls, *args: Any, **_: Any) -> Record:
        record = super().__new__(cls)
        record.__dict__.update(args=args, state=None, items=[])
        return record

    def __init__(self, *args: Any, **_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def get(self, key: str) -> Any:
        """An entry of the state, if that is a dict."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def _named_record(module: str, name: str) -> type[Record]:
    return type("Named", (Record,), {"module": module, "name": name})


class _Mapping(dict):
    def __setstate__(self, state: Any) -> None:  # ignores the hooks and _metadata of an OrderedDict
        pass


class _Items(list):
    """A set, as a list, for members may be unhashable records."""

    add = list.append
    __setstate__ = _Mapping.__setstate__


_PLAIN = {("collections", "OrderedDict"): _Mapping, ("builtins", "set"): _Items}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        root = module.partition(".")[0]
        if plain := _PLAIN.get((module, name)):
            return plain
        standard = root in sys.stdlib_module_names and name not in PLAIN_STDLIB.get(module, ())
        if standard or (root == "torch" and not _is_torch_data(module, name)):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which does not belong in a checkpoint")
        return _named_record(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[2], str)):
            raise pickle.UnpicklingError("it refers to data in an unknown way")
        kind = pid[1]
        if not (isinstance(kind, type) and issubclass(kind, Record)):
            raise pickle.UnpicklingError("it holds a storage of no known type")
        return _named_record("", "storage")(kind.name, pid[2], pid[4])


def _is_torch_data(module: str, name: str) -> bool:
    """True for module classes, tensors, storages, sizes and dtypes, but not for functions that load or run code."""
    if module.startswith("torch.nn."):
        return True
    if module == "torch._utils":
        return name in TORCH_FUNCTIONS
    if module in ("torch", "torch.storage"):
        plain = name in ("Size", "device", "Tensor") or name.endswith("Storage")
        return plain or isinstance(vars(torch).get(name), torch.dtype)  # vars: no lazy import
    return False


def load_inert(program: bytes) -> Any:
    """The object that a pickle describes: dicts, lists, plain values and `Record` objects.

    Raises pickle.UnpicklingError with the reason for anything that torch does not write.
    """
    try:
        _check_program(program)
        return _Unpickler(io.BytesIO(program), encoding="latin1").load()
    except (RecursionError, MemoryError):
        raise pickle.UnpicklingError("its object graph is too deep or too large") from None
    except (EOFError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
        raise pickle.UnpicklingError("its object graph is malformed") from None


def is_module(value: Any) -> bool:
    """Whether a value is the record of a torch module."""
    return isinstance(value, Record) and isinstance(value.get("_modules"), dict)


def _check_program(program: bytes) -> None:
    """Refuses opcodes that torch never writes, and memo slots beyond the program's length, which would allocate."""
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
        raise pickle.UnpicklingError("its pickle numbers objects that it does not have")


MAX_PICKLE_BYTES = 64 * 2**20
MAX_MODULES = MAX_TENSORS = 100_000
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


class ForeignFile:
    """A context manager for a PyTorch zip file, opened for reading data only.

    ``content`` is the unpickled object: dicts, lists, plain values and `Record` objects. Raises UserError, beginning
    with the path, for other files and for contradictions in the file.
    """

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
            kind, key, count = storage.args
            size, stride = _plain_ints(size), _plain_ints(stride)
            dtype = STORAGE_DTYPES[kind]
            available = self._sizes[f"{self._folder}data/{key}"] // dtype.itemsize
            elements = 1
            for length in size:
                elements *= length
            last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
            fits = isinstance(offset, int) and offset >= 0 and count <= available and elements <= count
            if not fits or (elements > 0 and last >= count):
                raise ValueError
        except (TypeError, ValueError, KeyError, AttributeError):
            raise self._refuse("a tensor does not match the data that is there") from None
        self._allowance -= 8 * elements
        if self._allowance < 0:
            raise self._refuse("its tensors declare far more data than the file has")
        if elements == 0:
            flat = torch.empty(size, dtype=dtype)
        else:
            data = bytearray(self._read(f"{self._folder}data/{key}"))
            flat = torch.frombuffer(data, dtype=dtype, count=count).as_strided(size, stride, offset)
        return flat.to(torch.float32 if dtype.is_floating_point else dtype, copy=True).contiguous()

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


def _plain_ints(value: Any) -> tuple[int, ...]:
    """A size: a tuple of ints, or the record of a torch.Size of one."""
    if isinstance(value, Record) and value.name == "Size" and value.args:
        value = value.args[0]
    if not isinstance(value, tuple | list) or not all(type(v) is int and 0 <= v < 2**48 for v in value):
        raise ValueError("not a size")
    return tuple(value)
