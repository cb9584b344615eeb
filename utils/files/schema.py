"""Checks plain data, of YAML, command lines and the headers of files, against type hints.

Bounds are in the metadata of a dataclass field (see `utils.config.settings.setting`), or in that of a type:
``Annotated[int, Bounds(1)]``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from utils.errors import UserError, all_mistakes, look_alike, one_line

T = TypeVar("T")


class Bounds(NamedTuple):
    """Inclusive; None: none."""

    low: float | None = None
    high: float | None = None


Count = Annotated[int, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]
TOO_LONG = "the number does not fit in 64 bits"
_LONGEST = 100  # characters of a value in a message
_NAMES = {  # of types, as users say
    **{int: "a whole number", float: "a number", bool: "true or false", str: "text"},
    **{list: "a list", tuple: "a list", dict: "'key: value' lines"},
}

hints_of = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))  # takes milliseconds


def suggestion(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """`` (did you mean 'x'?)`` for the known name that is closest to ``name``; "" if none has ``least`` in common."""
    known = list(known)
    if alike := next((other for other in known if look_alike(name, other)), None):
        return f" ({name!a}; did you mean {alike!a}, which looks the same?)"
    close = difflib.get_close_matches(name, known, n=1, cutoff=least)
    return f" (did you mean '{close[0]}'?)" if close else ""


def fits_64_bits(number: int) -> bool:
    """Whether torch, numpy and checkpoints can hold ``number``."""
    return abs(number) < 2**63


def parts_of(hint: Any) -> tuple[Any, bool, Bounds]:
    """A hint without ``Annotated`` and ``| None``, whether it allows None, and its bounds."""
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    hint = typing.get_args(hint)[0] if optional else hint
    hint, bounds = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, Bounds())
    return hint, optional, bounds


def type_of(field: dataclasses.Field, owner: type) -> Any:
    return parts_of(hints_of(owner)[field.name])[0]


def build(cls: type[T], values: Any, where: str, unknown: Callable[[str], str] | None = None) -> T:
    """A dataclass from a mapping (None: empty). ``unknown``: says what to do about an unknown key.

    Raises UserError that begins with ``where`` for unknown and missing keys and for wrong values.
    """
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: must be 'key: value' lines, got {type(values).__name__}")
    fields, hints = {field.name: field for field in dataclasses.fields(cls)}, hints_of(cls)
    checked: dict[str, Any] = {}
    unknown_keys = values.keys() - fields.keys()
    with all_mistakes() as mistakes:
        for key, value in values.items():
            if mistakes.are_many:
                break
            if key in unknown_keys:
                message = unknown(str(key)) if unknown else f"unknown key '{key}'{suggestion(str(key), fields)}"
                mistakes.add(f"{where}: {message}")
                continue
            with mistakes.noted():
                checked[key] = check(value, hints[key], f"{where}: {key}", fields[key].metadata)
        for name, field in fields.items():
            is_required = field.default is field.default_factory is dataclasses.MISSING
            if is_required and name not in values and not unknown_keys:  # of which one may be it, misspelled
                mistakes.add(f"{where}: has no '{name}'")
    return cls(**checked)


def check(value: Any, hint: Any, where: str, bounds: Mapping[str, Any] | None = None) -> Any:
    """Returns ``value`` as ``hint`` says: whole numbers become floats, lists tuples, and mappings dataclasses.

    Args:
        hint: a class, also a dataclass or TypedDict, whose further keys stay as they are; a list, dict or tuple of
            such; also with ``| None``.
        bounds: ``low`` and ``high``, inclusive; ``also``, a value beyond them; ``choices``, the allowed values, of a
            list the allowed elements; ``is_line``, whether text must be a single line.

    Raises UserError that begins with ``where``.
    """
    hint, optional, own = parts_of(hint)
    if hint is Any or (optional and value is None):
        return value
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, where)
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    required = getattr(hint, "__required_keys__", None)  # of a TypedDict
    if required is not None:
        kind = dict
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # YAML 1.1 reads "1e-3" as text
            value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        wanted = _NAMES.get(kind, kind.__name__) + " or null" * optional
        raise UserError(f"{where}: must be {wanted}, got {_shown(value)}")
    if required is not None:
        if missing := sorted(required - value.keys()):
            raise UserError(f"{where}: has no '{missing[0]}'")
        known = hints_of(hint)
        return {k: check(v, known[k], f"{where}: {k}") if k in known else v for k, v in value.items()}
    if kind in (list, tuple):
        is_fixed = kind is tuple and ... not in parts
        if is_fixed and len(value) != len(parts):
            raise UserError(f"{where}: must be {len(parts)} values, got {_shown(value)}")
        elements = parts if is_fixed else (parts or (Any,))[:1] * len(value)
        value = kind(check(v, element, f"{where} ({i})") for i, (v, element) in enumerate(zip(value, elements)))
    elif kind is dict and parts:
        for key in value:
            check(key, parts[0], f"{where}: the key {_shown(key)}")
        value = {k: check(v, parts[1], f"{where}: {str(k)[:_LONGEST]}") for k, v in value.items()}
    elif kind is int and not fits_64_bits(value):
        raise UserError(f"{where}: {TOO_LONG}")
    if bounds or own != Bounds():
        _check_bounds(value, where, bounds or own._asdict())
    return value


def _check_bounds(value: Any, where: str, bounds: Mapping[str, Any]) -> None:
    choices, also, low, high = (bounds.get(name) for name in ("choices", "also", "low", "high"))
    if isinstance(value, float) and math.isinf(value):
        raise UserError(f"{where}: must be a finite number, got {value!r}")
    if bounds.get("is_line") and one_line(value) != value:
        raise UserError(f"{where}: {value!r} contains a control character or is not UTF-8; choose another name")
    parts = value if isinstance(value, list) else [value]
    if choices and (others := [_shown(part) for part in parts if part not in choices]):
        raise UserError(f"{where}: must be one of {', '.join(choices)}, got {', '.join(others)}")
    if also is not None and value == also:
        return
    if low is not None and not value >= low:
        instead = "" if also is None else f" or {also}"
        raise UserError(f"{where}: must be at least {low}{instead}, got {value!r}")
    if high is not None and not value <= high:
        raise UserError(f"{where}: must be at most {high}, got {value!r}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
