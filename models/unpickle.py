"""Unpickles without running anything: every class or function a pickle names becomes an inert record.

A pickle is a program that may call whatever it can import. Here nothing is imported, and what is named is replaced by a
class that keeps what it is given. Names from the standard library (``os.system``, ``builtins.eval``, ...) have no place
in a checkpoint, so a file with one is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from typing import Any

import torch

MAX_OPCODES = 2_000_000  # each may make an object, a hundred times the size of the opcode
OPCODES_REFUSED = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID"}  # torch writes none
PLAIN_STDLIB = {  # data that public checkpoints hold, kept as inert records like everything else
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "slice"),
    ("builtins", "frozenset"),
    ("collections", "defaultdict"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PureWindowsPath"),
    ("pathlib", "Path"),
    ("types", "SimpleNamespace"),
}
TORCH_FUNCTIONS = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state"}


class Record:
    """An object of a foreign class: its arguments and state, and no behaviour.

    Subclasses are made for each file and each name, so that nothing a file does to one outlives it. ``__setstate__``
    on the class is what keeps the pickle's BUILD from setting attributes of its choice.
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
        """An entry of the state, where that is a dict."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def _named_record(module: str, name: str) -> type[Record]:
    return type("Named", (Record,), {"module": module, "name": name})


def _inert_mapping() -> type[dict]:
    class Mapping(dict):
        def __setstate__(self, state: Any) -> None:  # hooks and _metadata of an OrderedDict: not wanted
            pass

    return Mapping


def _inert_set() -> type[list]:
    class Items(list):  # a list, for members may be unhashable records
        def __setstate__(self, state: Any) -> None:
            pass

        def add(self, item: Any) -> None:
            self.append(item)

    return Items


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        root = module.partition(".")[0]
        if (module, name) == ("collections", "OrderedDict"):
            return _inert_mapping()
        if (module, name) == ("builtins", "set"):
            return _inert_set()
        standard = root in sys.stdlib_module_names and (module, name) not in PLAIN_STDLIB
        if standard or (root == "torch" and not _is_torch_data(module, name)):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place in a checkpoint")
        return _named_record(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[2], str)):
            raise pickle.UnpicklingError("it refers to data in an unknown way")
        kind = pid[1]
        if not (isinstance(kind, type) and issubclass(kind, Record)):
            raise pickle.UnpicklingError("it holds a storage of no known type")
        return _named_record("", "storage")(kind.name, pid[2], pid[4])


def _is_torch_data(module: str, name: str) -> bool:
    """Module classes, tensors, storages, sizes and dtypes; no function that loads, compiles or downloads."""
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

    Raises pickle.UnpicklingError with the reason for whatever torch would not have written.
    """
    try:
        _check_program(program)
        return _Unpickler(io.BytesIO(program), encoding="latin1").load()
    except (RecursionError, MemoryError):
        raise pickle.UnpicklingError("its object graph is too deep or too large") from None
    except (EOFError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
        raise pickle.UnpicklingError("its object graph is malformed") from None


def is_module(value: Any) -> bool:
    """Whether a record has what every torch module has."""
    return isinstance(value, Record) and isinstance(value.get("_modules"), dict)


def _check_program(program: bytes) -> None:
    """Refuses opcodes that torch never writes, and memo slots far beyond the program's length (they allocate)."""
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
