"""Reads the pickle of a PyTorch file as data.

`read_program` interprets the opcodes one by one; each creates at most one small object. A call of any class or function
that the pickle names becomes an inert `Record`.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_OPCODES = 2_000_000  # each can create an object of a hundred bytes
MAX_INTEGER_BITS = 128


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

    kind: str  # such as FloatStorage
    key: str  # its entry in the archive


_ORDERED_DICT = Name("collections", "OrderedDict")
_SIZE = Name("torch", "Size")
_SETS = [Name(module, kind) for module in ("builtins", "__builtin__") for kind in ("set", "frozenset")]


@dataclass(slots=True, eq=False)
class Record:
    """An object that a pickle creates by calling ``kind`` with ``args``, and the ``state`` set on it afterwards."""

    kind: Name
    args: tuple
    state: Any = None

    def get(self, key: str) -> Any:
        """Returns an entry of the state if the state is a dict, else None."""
        return self.state.get(key) if isinstance(self.state, dict) else None

    def calls(self, *functions: str) -> bool:
        """Returns whether one of these ``functions`` of torch._utils, which create tensors, was called."""
        return self.kind.module == "torch._utils" and self.kind.name in functions


def read_program(program: bytes) -> Any:
    """Interprets a pickle program. Returns the object that it describes, made of dicts, lists (also for sets), tuples,
    plain values, and `Name`, `Storage` and `Record` objects. Raises pickle.UnpicklingError with the reason for anything
    that torch does not write."""
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
    """The state of a pickle program. Its methods are opcodes. An opcode that does not fit the state raises one of the
    errors that `read_program` reports as malformed data."""

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
        elif not isinstance(target, Record):  # a Record is an instance of a list subclass, whose items are unused
            raise TypeError

    def set_item(self, _: object) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._add_items([key, value])

    def set_marked_items(self, _: object) -> None:
        self._add_items(self.pop_to_mark())

    def _add_items(self, items: list[Any]) -> None:
        """Adds alternating keys and values to the dict on the stack."""
        target = self.stack[-1]
        if isinstance(target, Record):  # an instance of a dict subclass, whose items are unused
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing nested tuples can take forever, because each can contain the next one twice.
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
        """Calls a name with a tuple of arguments. Containers are not copied: copies of one container in a hundred calls
        could be far larger than the file."""
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
        self.stack.pop()  # the keywords, which are unused
        self.call(None)

    def set_state(self, _: object) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # a dict is an OrderedDict, whose attributes are unused
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
