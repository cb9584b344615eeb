"""Reads PyTorch files (torch >= 1.6) as data: a zip archive of raw storages and one pickle.

No code in a file is run, and what it asks for is bounded by its size. `read_program` takes the opcodes of the pickle
one by one; each makes at most one small object. Every class or function that the pickle names becomes an inert `Record`
when it is called, and tensors are views of the storages, which are entries of the archive.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from utils.errors import UserError, first_line
from utils.files.safe_io import open_regular
from utils.machine.limits import explanation

MAX_OPCODES = 2_000_000  # each may make an object of a hundred bytes
MAX_PICKLE_BYTES = 64 * 2**20
MAX_INTEGER_BITS = 128
MAX_DIMENSIONS = 16
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
_IS_FOLDER = 0x10  # among an entry's attributes
_READ_BYTES = 1 << 24
# What zipfile raises for a damaged archive, or for one that a disk does not deliver.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError, ValueError)


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that a pickle refers to."""

    kind: str  # a key of `STORAGE_DTYPES`
    key: str  # its entry in the archive


_ORDERED_DICT = Name("collections", "OrderedDict")
_SIZE = Name("torch", "Size")
_SETS = [Name(module, kind) for module in ("builtins", "__builtin__") for kind in ("set", "frozenset")]


@dataclass(slots=True, eq=False)
class Record:
    """An object that a pickle creates by calling ``kind`` with ``args``, and the ``state`` that it is then given."""

    kind: Name
    args: tuple
    state: Any = None

    def get(self, key: str) -> Any:
        """Returns an entry of the state if that is a dict, else None."""
        return self.state.get(key) if isinstance(self.state, dict) else None

    def calls(self, *functions: str) -> bool:
        """Returns whether one of these ``functions`` of torch._utils, which create tensors, was called."""
        return self.kind.module == "torch._utils" and self.kind.name in functions


def read_program(program: bytes) -> Any:
    """Runs a pickle program. Returns the object that it describes: dicts, lists (also for sets), tuples, plain values,
    `Name`, `Storage` and `Record` objects. Raises pickle.UnpicklingError with the reason for anything that torch does
    not write."""
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
            if count == MAX_OPCODES:
                raise pickle.UnpicklingError(f"its object graph has more than {MAX_OPCODES:,} parts")
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise pickle.UnpicklingError(f"its pickle has the opcode {opcode.name}, which PyTorch does not write")
            action(machine, argument)
        return machine.stack.pop()
    except MemoryError:
        raise pickle.UnpicklingError("its object graph is too large") from None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise pickle.UnpicklingError("its object graph is malformed") from None


class _Machine:
    """The state of a pickle program. Its methods are opcodes; those that do not fit the state raise any error of
    malformed data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []  # lengths of the stack
        self._memo: dict[int, Any] = {}
        self._names: dict[tuple[str, str], Name] = {}

    def ignore(self, _: object) -> None:
        pass

    def push(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise pickle.UnpicklingError(f"it holds an integer of more than {MAX_INTEGER_BITS} bits")
        self.stack.append(value)

    def mark(self, _: object) -> None:
        self._marks.append(len(self.stack))

    def pop(self, _: object) -> None:
        self.stack.pop()

    def discard_to_mark(self, _: object) -> None:
        self.pop_to_mark()

    def pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def store(self, slot: int) -> None:
        self._memo[slot] = self.stack[-1]

    def store_next(self, _: object) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def recall(self, slot: int) -> None:
        self.stack.append(self._memo[slot])

    def empty_dict(self, _: object) -> None:
        self.stack.append({})

    def empty_list(self, _: object) -> None:
        self.stack.append([])

    def make_dict(self, _: object) -> None:
        items = self.pop_to_mark()
        self.stack.append({})
        self._add_items(items)

    def make_list(self, _: object) -> None:
        self.stack.append(self.pop_to_mark())

    def make_tuple(self, _: object) -> None:
        self.stack.append(tuple(self.pop_to_mark()))

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise IndexError
        del self.stack[-count:]
        self.stack.append(items)

    def append(self, _: object) -> None:
        item = self.stack.pop()
        self._extend([item])

    def append_marked(self, _: object) -> None:
        self._extend(self.pop_to_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Record):  # of a subclass of list, whose items nobody reads
            raise TypeError

    def set_item(self, _: object) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._add_items([key, value])

    def set_marked_items(self, _: object) -> None:
        self._add_items(self.pop_to_mark())

    def _add_items(self, items: list[Any]) -> None:
        """Adds keys and values, which alternate, to the dict on the stack."""
        target = self.stack[-1]
        if isinstance(target, Record):  # of a subclass of dict, whose items nobody reads
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of a tuple of tuples of tuples can take forever: each may contain the next one twice.
            if isinstance(key, tuple) and any(isinstance(part, tuple) for part in key):
                raise TypeError
            target[key] = value

    def name(self, text: str) -> None:
        """``text``: module and name, separated by a space."""
        self._push_name(*text.split(" ", 1))

    def name_on_stack(self, _: object) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError
        self.stack.append(self._names.setdefault((module, name), Name(module, name)))

    def call(self, _: object) -> None:
        """Calls a name with a tuple of arguments. Containers are not copied: one of them in a hundred calls could be
        far larger than the file."""
        args = self.stack.pop()
        name = self.stack.pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise TypeError
        if name == _ORDERED_DICT:
            if args:  # torch writes its items one by one
                raise TypeError
            self.stack.append({})
        elif name in _SETS:
            (members,) = args or ([],)
            self.stack.append(members)
        elif name == _SIZE:
            (sides,) = args
            self.stack.append(sides)
        else:
            self.stack.append(Record(name, args))

    def call_with_keywords(self, _: object) -> None:
        self.stack.pop()  # nobody reads them
        self.call(None)

    def set_state(self, _: object) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict, whose attributes nobody reads
            raise TypeError

    def refer(self, _: object) -> None:
        """Pushes a reference to a storage."""
        match self.stack.pop():
            case ("storage", Name(_, kind), str(key), *_):
                self.stack.append(Storage(kind, key))
            case _:
                raise pickle.UnpicklingError("it refers to data in an unknown way")


def _constant(value: Any) -> Callable[[_Machine, object], None]:
    return lambda machine, _: machine.push(value)


def _tuple_of(count: int) -> Callable[[_Machine, object], None]:
    return lambda machine, _: machine.tuple_of(count)


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Machine.ignore),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), _Machine.push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.store),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), _Machine.empty_list),
    **dict.fromkeys(("LIST", "FROZENSET"), _Machine.make_list),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _Machine.append_marked),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": _Machine.make_tuple,
    "EMPTY_DICT": _Machine.empty_dict,
    "DICT": _Machine.make_dict,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.discard_to_mark,
    "MEMOIZE": _Machine.store_next,
    "APPEND": _Machine.append,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_marked_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_on_stack,
    "NEWOBJ_EX": _Machine.call_with_keywords,
    "BUILD": _Machine.set_state,
    "BINPERSID": _Machine.refer,
}


class TorchFile:
    """A PyTorch file, opened for reading data only: a context manager. Raises UserError, beginning with the path, for
    other files and for contradictions in the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open_checkpoint(path)
        try:
            self._zip = open_zip(self._file, path)
            self._entries = {entry.filename: entry for entry in self._zip.infolist()}
            self._allowance = MAX_AMPLIFICATION * os.fstat(self._file.fileno()).st_size
            self._storages: dict[str, Tensor] = {}
            self.content = self._read_content()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check_sums(self) -> None:
        """Raises UserError if the checksum of an entry is wrong, also of one that nothing refers to."""
        try:
            wrong = self._zip.testzip()
        except _ZIP_ERRORS as error:
            raise_if_limit(error, self.path)
            raise UserError(f"{self.path}: damaged checkpoint ({str(error)[:100]})") from None
        if wrong is not None:
            raise UserError(f"{self.path}: damaged checkpoint (the checksum of its entry {wrong[:100]} is wrong)")

    def view(self, value: Any) -> Tensor | None:
        """Returns the tensor of a record as a view of its storage, or None for other values. The tensors of a file may
        not be far larger than the file."""
        if isinstance(value, Record) and value.calls("_rebuild_parameter", "_rebuild_parameter_with_state"):
            value = value.args[0] if value.args else None
        if not isinstance(value, Record):
            return None
        if not value.calls("_rebuild_tensor", "_rebuild_tensor_v2"):
            if value.kind.module == "torch._utils" and value.kind.name.startswith("_rebuild"):
                raise self.refuse(f"a tensor is of a kind that no detector has ({value.kind})")
            return None
        try:
            storage, offset, size, stride = value.args[:4]
            if len(size) > MAX_DIMENSIONS:
                raise ValueError
            flat = self._bytes_of(storage.key).view(STORAGE_DTYPES[storage.kind])
            view = flat.as_strided(size, stride, offset).detach()  # torch checks that it is within the storage
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError):
            raise self.refuse("a tensor does not match the data that is there") from None
        self._allowance -= max(view.element_size(), 4) * view.numel()
        if self._allowance < 0:
            raise self.refuse("its tensors declare far more data than the file has")
        return view

    def refuse(self, reason: str) -> UserError:
        return UserError(f"{self.path}: refused: {reason}")

    def _bytes_of(self, key: str) -> Tensor:
        """Reads the bytes of a storage, uint8, once: many tensors may be views of them."""
        if key not in self._storages:
            entry = self._entries[f"{self._folder}data/{key}"]
            content = torch.empty(entry.file_size, dtype=torch.uint8, device="cpu")
            target = content.numpy().data
            position = 0
            with self._reading(entry.filename), self._zip.open(entry) as source:
                while part := source.read(_READ_BYTES):
                    target[position : position + len(part)] = part
                    position += len(part)
            self._storages[key] = content
        return self._storages[key]

    def _read(self, entry: str) -> bytes:
        with self._reading(entry):
            return self._zip.read(entry)

    @contextlib.contextmanager
    def _reading(self, entry: str) -> Iterator[None]:
        try:
            yield
        except _ZIP_ERRORS as error:
            raise_if_limit(error, self.path)
            raise UserError(f"{self.path}: damaged (entry {entry[:100]} cannot be read)") from None

    def _read_content(self) -> Any:
        pickles = [name for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise UserError(f"{self.path}: not a PyTorch checkpoint (no data.pkl inside)")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = self._folder + "byteorder"
        if order in self._entries and self._read(order) != b"little":
            raise self.refuse("it was written on a big-endian machine")
        if self._entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise self.refuse(f"its object graph exceeds {MAX_PICKLE_BYTES >> 20} MiB")
        program = self._read(pickles[0])
        try:
            return read_program(program)
        except pickle.UnpicklingError as error:
            raise self.refuse(first_line(error)) from None


def open_checkpoint(path: str | Path) -> BinaryIO:
    """Opens a checkpoint once for all that is read of it, since a training process may replace the file meanwhile."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        return open_regular(path)
    except OSError as error:
        raise_if_limit(error, path)
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def open_zip(file: BinaryIO, path: str | Path) -> zipfile.ZipFile:
    """Opens the zip archive in the file of `open_checkpoint`, which the caller closes. PyTorch stores entries
    uncompressed, so together they cannot exceed the file. Raises UserError for anything else."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        # zipfile raises BadZipFile also if reading fails.
        raise_if_limit(error if isinstance(error, OSError) else error.__context__ or error, path)
        raise UserError(f"{path}: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)") from None
    entries = archive.infolist()
    reason = ""
    if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
        reason = "its entries are compressed, but PyTorch's never are"
    elif any(not e.filename or e.is_dir() or e.external_attr & _IS_FOLDER for e in entries):  # torch reads nothing
        reason = "it holds folders or entries without a name"
    elif min((e.header_offset for e in entries), default=0):  # torch would read that data, which is not checked here
        reason = "there is data before the archive"
    elif len({e.filename for e in entries}) < len(entries):
        reason = "two of its entries have the same name"
    elif sum(e.file_size for e in entries) > os.fstat(file.fileno()).st_size:
        reason = "its entries declare more data than the file has"
    if reason:
        raise UserError(f"{path}: refused: {reason}")
    return archive


def raise_if_limit(error: BaseException, path: str | Path) -> None:
    """Raises ``error`` if its cause is a limit of the machine (`explanation`), not the file."""
    if explanation(error):
        if isinstance(error, OSError):
            error.filename = str(path)
        raise error
