"""Reads tensors out of PyTorch files that this program did not write: a zip of raw storages and one pickle.

Nothing in the file is run (unpickle.py), and sizes are checked against the file before anything is allocated.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.unpickle import Record, is_module, load_inert
from utils.errors import UserError
from utils.torch_zip import open_zip

MAX_PICKLE_BYTES = 64 * 2**20
MAX_MODULES = MAX_TENSORS = 100_000
MAX_AMPLIFICATION = 16  # bytes of tensors read out for each byte of the file: float16 to float32, and some sharing
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
    """A PyTorch zip file, opened for reading data only. A context manager.

    ``content`` is the unpickled object: dicts, lists, plain values and `Record` objects.
    Raises UserError, in one line that begins with the path, for whatever is not such a file or does not add up.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._zip = open_zip(path)
        try:
            self._sizes = {entry.filename: entry.file_size for entry in self._zip.infolist()}
            self._allowance = MAX_AMPLIFICATION * self.path.stat().st_size
            self.content = self._load()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> ForeignFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

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
            raise self._refuse(str(error).splitlines()[0]) from None

    def tensor(self, value: Any) -> Tensor | None:
        """The tensor that a record stands for, floating ones as float32; None for anything else."""
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
        """Parameters and buffers by name: of a module record, or of a mapping from names to tensors."""
        if isinstance(value, dict):
            tensors = ((k, self.tensor(v)) for k, v in value.items() if isinstance(k, str))
        else:
            tensors = ((name, self.tensor(leaf)) for name, leaf in self._leaves(value))
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def modules(self, root: Any) -> Iterator[tuple[str, Record]]:
        """The module records in ``root``, itself first, with their dotted names; none if it is no module."""
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
