"""Checks plain data (values from YAML, command lines and file headers) against type hints.

Bounds are in the metadata of a dataclass field (see `utils.config.settings.setting`) or of a type: ``Annotated[int,
Bounds(1)]``. Neither pydantic nor msgspec can replace this module: importing pydantic takes longer than all of
``--help``, and msgspec stops at the first mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence, ValuesView
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from utils.errors import UserError, all_mistakes, one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DataclassT = TypeVar("DataclassT", bound="DataclassInstance")


class Bounds(NamedTuple):
    """The allowed values.

    Args:
        low, high: inclusive; None: no bound.
        sentinel: one value outside these bounds that has a special meaning.
        choices: the allowed values, or for a list, the allowed elements; None: any.
        is_line: text must be a single line.
        is_filled: text must not be blank, a list not empty.
        is_folder: text must name a new folder, perhaps below others: not "", ".", "/" or anything with "..".
        is_output: text is the path of a file or folder that is written; `check` expands a leading ``~``.
    """

    low: float | None = None
    high: float | None = None
    sentinel: Any = None
    choices: tuple[str, ...] | None = None
    is_line: bool = False
    is_filled: bool = False
    is_folder: bool = False
    is_output: bool = False


UNBOUNDED = Bounds()


class Hint(NamedTuple):
    """A type hint without ``Annotated`` and ``| None``."""

    type: Any
    is_optional: bool
    bounds: Bounds | None  # None: not ``Annotated``


Count = Annotated[int, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]
_MAX_SHOWN_CHARACTERS = 100  # per value in a message
_REPR = reprlib.Repr()  # does not write out lists of lists
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MAX_SHOWN_CHARACTERS + 1
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "'key: value' lines",
}


@functools.cache  # takes milliseconds
def hints_of(owner: Callable[..., Any]) -> dict[str, Any]:
    """Returns the type hints of a class or function by name, with ``Annotated``."""
    return typing.get_type_hints(owner, include_extras=True)


def suggestion(name: str, known: Iterable[str], min_similarity: float = 0.6) -> str:
    """Returns `` (did you mean 'x'?)`` with the known name closest to ``name``, ignoring case, or "" if none is close.
    ``min_similarity``: 0 to 1, as in difflib."""
    known_by_key = {other.casefold(): other for other in reversed([*known])}
    closest = difflib.get_close_matches(name.casefold(), known_by_key, n=1, cutoff=min_similarity)
    return f" (did you mean '{known_by_key[closest[0]]}'?)" if closest else ""


@functools.cache
def parse_hint(hint: Any) -> Hint:
    """Splits a type hint into its parts. Raises TypeError for unions other than of one type and None, because a value
    would not determine which type is meant."""
    is_optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        is_optional = len(members) < len(typing.get_args(hint))
        if len(members) != 1:
            raise TypeError(f"{hint}: only unions of one type and None can be checked")
        hint = members[0]
    if typing.get_origin(hint) is Annotated:
        kind, bounds = typing.get_args(hint)
        return Hint(kind, is_optional, bounds)
    return Hint(hint, is_optional, None)


def type_of(field: dataclasses.Field, owner: type) -> Any:
    """Returns the type of a field of ``owner``, without ``Annotated`` and ``| None``."""
    return parse_hint(hints_of(owner)[field.name]).type


def build(cls: type[DataclassT], values: Any, location: str, unknown: Callable[[str], str] | None = None) -> DataclassT:
    """Creates a dataclass from a mapping (None: empty). ``unknown`` returns the message for an unknown key.

    Raises UserError that begins with ``location`` ("": with the key) for unknown and missing keys and for wrong values.
    """
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise UserError(f"{location}: must be 'key: value' lines, got {type(values).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = hints_of(cls)
    checked: dict[str, Any] = {}
    with all_mistakes() as mistakes:
        for key, value in values.items():
            if mistakes.are_many:
                break
            if key not in fields:
                problem = unknown(str(key)) if unknown else f"unknown key '{key}'{suggestion(str(key), fields)}"
                mistakes.add(f"{location}: {problem}" if location else problem)
                continue
            with mistakes.collecting():
                key_location = f"{location}: {key}" if location else key
                checked[key] = check(value, hints[key], key_location, fields[key].metadata.get("bounds"))
        if values.keys() <= fields.keys():  # an unknown key may be a missing one, misspelled
            required = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
            for name in required:
                if name not in values:
                    mistakes.add(f"{location}: has no '{name}'" if location else f"{name}: is missing")
    return cls(**checked)


def check(value: Any, hint: Any, location: str, bounds: Bounds | None = None) -> Any:
    """Returns ``value`` converted to the type ``hint``: integers to floats, lists to tuples, mappings to dataclasses,
    and paths of outputs to paths without ``~``.

    Args:
        hint: a class, a dataclass, or a TypedDict, whose undeclared keys are kept unchecked; a list, dict or tuple of
            these; or one of these with ``| None``.
        bounds: replace those in ``hint``.

    Raises UserError that begins with ``location``.
    """
    kind, is_optional, hint_bounds = parse_hint(hint)
    bounds = hint_bounds if bounds is None else bounds
    if kind is Any or (is_optional and value is None):
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value, location)
    plain_type = dict if typing.is_typeddict(kind) else typing.get_origin(kind) or kind
    is_bool = isinstance(value, bool)
    # YAML has no tuples, and reads "1e-3" as text.
    if plain_type is tuple and isinstance(value, list):
        value = tuple(value)
    if plain_type is float and isinstance(value, int | str) and not is_bool:
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)
    if not isinstance(value, plain_type) or (is_bool and plain_type is not bool):
        wanted = _TYPE_NAMES.get(plain_type, plain_type.__name__)
        raise UserError(f"{location}: must be {wanted}{' or null' if is_optional else ''}, got {bounded_repr(value)}")
    if plain_type in _CHECKERS:
        value = _CHECKERS[plain_type](value, kind, location)
    if bounds is not None:
        _check_bounds(value, location, bounds)
        if bounds.is_output:
            value = os.path.expanduser(value)
    return value


def _check_int(value: int, _: Any, location: str) -> int:
    if abs(value) >= 2**63:  # torch, NumPy and checkpoints cannot store it
        raise UserError(f"{location}: the number does not fit in 64 bits")
    return value


def _check_text(value: str, _: Any, location: str) -> str:
    """Checks that text can be the name of a file or an argument of a process. Names that are not UTF-8 can."""
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(value):
            return value
    raise UserError(f"{location}: {bounded_repr(value)} contains a NUL or an unpaired surrogate")


def _check_dict(value: dict, kind: Any, location: str) -> dict:
    hints: Mapping[str, Any] = {}
    other_hint = Any
    if typing.is_typeddict(kind):
        for key in sorted(kind.__required_keys__ - value.keys()):
            raise UserError(f"{location}: has no '{key}'")
        hints = hints_of(kind)
    elif typing.get_args(kind):
        key_hint, other_hint = typing.get_args(kind)
        for key in value:
            check(key, key_hint, f"{location}: the key {bounded_repr(key)}")
    return {
        key: check(item, hints.get(key, other_hint), f"{location}: {str(key)[:_MAX_SHOWN_CHARACTERS]}")
        for key, item in value.items()
    }


def _check_elements(value: list | tuple, kind: Any, location: str) -> list | tuple:
    hints = typing.get_args(kind) or (Any, ...)
    if isinstance(value, list) or hints[-1] is ...:
        hints = hints[:1] * len(value)
    if len(value) != len(hints):
        raise UserError(f"{location}: must be {len(hints)} values, got {bounded_repr(value)}")
    elements = enumerate(zip(value, hints), 1)
    return type(value)(check(item, hint, f"{location}: element {number}") for number, (item, hint) in elements)


_CHECKERS: dict[type, Callable[[Any, Any, str], Any]] = {
    int: _check_int,
    str: _check_text,
    dict: _check_dict,
    list: _check_elements,
    tuple: _check_elements,
}


def _check_bounds(value: Any, location: str, bounds: Bounds) -> None:
    if isinstance(value, float) and math.isinf(value):
        raise UserError(f"{location}: must be a finite number, got {value!r}")
    if bounds.is_line and one_line(value) != value:
        raise UserError(f"{location}: {value!r} contains a control character or is not UTF-8; choose another name")
    if bounds.is_filled and not (value.strip() if isinstance(value, str) else value):
        raise UserError(f"{location}: must not be empty")
    if bounds.is_folder and (not PurePath(value).name.strip() or ".." in PurePath(value).parts):
        raise UserError(f"{location}: {value!r} is not the name of a new folder; choose another, such as exp")
    if bounds.choices:
        elements = value if isinstance(value, list) else [value]
        refused = [bounded_repr(element) for element in elements if element not in bounds.choices]
        if refused:
            raise UserError(f"{location}: must be one of {', '.join(bounds.choices)}, got {', '.join(refused)}")
    if bounds.sentinel is not None and value == bounds.sentinel:
        return
    if bounds.low is not None and not value >= bounds.low:  # also NaN
        alternative = "" if bounds.sentinel is None else f" or {bounds.sentinel}"
        raise UserError(f"{location}: must be at least {bounds.low}{alternative}, got {_number(value)}")
    if bounds.high is not None and not value <= bounds.high:
        raise UserError(f"{location}: must be at most {bounds.high}, got {_number(value)}")


def _number(value: float) -> str:
    """Returns a number as users write it: 25 for 25.0, to which a whole number for a float has been converted."""
    return repr(value).removesuffix(".0")


def bounded_repr(value: Any) -> str:
    """Returns the beginning of a value's repr, for messages; aliases of a YAML can make the whole very large."""
    text = _REPR.repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def plain_value(name: str, value: Any) -> Any:
    """Converts the value of the keyword ``name`` to None, a bool, a number, text, or a list or dict of these.

    Arrays, numbers and tensors of NumPy and torch become lists and numbers; sequences, views of dicts, and sets in the
    order of their text become lists; paths and torch's devices become text; an instance of a subclass, such as a member
    of an Enum, becomes its plain value. Raises UserError that begins with ``name`` for any other value.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain_value(name, key): plain_value(name, item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)  # their own order changes from process to process
    if isinstance(value, Sequence | KeysView | ValuesView) and not isinstance(value, bytes | bytearray):
        return [plain_value(name, item) for item in value]
    kind = type(value)
    if f"{kind.__module__}.{kind.__name__}" == "torch.device":
        return str(value)
    raise UserError(
        f"{name}: must be text, a number, or a list or mapping of these, got an object of type {kind.__name__}"
    )


def checked_value(name: str, value: Any, hint: Any) -> Any:
    """Returns the `plain_value` of a keyword, checked against its type ``hint``. Raises UserError that begins with
    ``name``."""
    kind, is_optional, bounds = parse_hint(hint)
    plain = number_as_bool(plain_value(name, value), kind)
    return None if plain is None and is_optional else check(plain, kind, name, bounds)


def number_as_bool(value: Any, kind: Any) -> Any:
    """Returns false and true for 0 and 1 if ``kind`` is bool, and other values unchanged."""
    return bool(value) if kind is bool and value in (0, 1) else value
