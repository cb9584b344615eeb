"""Values of keyword arguments as plain data, which JSON and YAML can hold, and their types."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import typing
from collections.abc import KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any

from utils.config.settings import Hyperparameters
from utils.config.yaml_files import MAX_DEPTH, parse_yaml_value
from utils.errors import UserError
from utils.schema import TOO_LONG, bounds_of, check, fits_64_bits, hints_of, parse_hint, type_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def plain_value(name: str, value: Any, depth: int = 0) -> Any:
    """Converts the value of the keyword ``name`` to None, a bool, a number, text, or a list or dict of these.

    Arrays, numbers and tensors of NumPy and torch become lists and numbers; sequences, views of dicts, and sets in the
    order of their text become lists; paths and torch's devices become text. ``depth``: number of lists and dicts
    around ``value``, at most `MAX_DEPTH`. Raises UserError that begins with ``name`` for any other value.
    """
    if depth > MAX_DEPTH:
        raise UserError(f"{name}: is nested too deeply, or contains itself")
    plain = _without_arrays(value)
    if isinstance(plain, Mapping):
        return {_plain_scalar(name, key): plain_value(name, item, depth + 1) for key, item in plain.items()}
    if isinstance(plain, set | frozenset):
        plain = sorted(plain, key=str)  # their own order changes from process to process
    if isinstance(plain, Sequence | KeysView | ValuesView) and not isinstance(plain, str | bytes | bytearray):
        return [plain_value(name, item, depth + 1) for item in plain]
    return _plain_scalar(name, plain)


def checked_value(name: str, value: Any, hint: Any) -> Any:
    """Returns the `plain_value` of a keyword, checked against its type ``hint``. Raises UserError that begins with
    ``name``."""
    kind, is_optional, bounds = parse_hint(hint)
    plain = plain_value(name, value)
    if kind is bool:
        plain = number_as_bool(plain)
    return None if plain is None and is_optional else check(plain, kind, name, bounds)


def checked_setting(owner: type[DataclassInstance], name: str, value: Any, location: str) -> Any:
    """Returns the value of the setting ``name`` of ``owner``, converted as on a command line, and checked. ``value``:
    a `plain_value`, or the words of a command line. Raises UserError that begins with ``location``."""
    fields = {field.name: field for field in dataclasses.fields(owner)}
    if owner is not Hyperparameters:
        converted = _as_setting(value, type_of(fields[name], owner))
    else:
        converted = parse_yaml_value(value, location) if isinstance(value, str) else value
    return check(converted, hints_of(owner)[name], location, bounds_of(fields[name]))


def _as_setting(value: Any, kind: Any) -> Any:
    """Converts a plain value to the type of a setting: numbers to text and text to numbers, one value to a list, and 0
    and 1 to false and true. Returns others unchanged, for `check` to refuse."""
    if typing.get_origin(kind) is list:
        (element_type,) = typing.get_args(kind)
        elements = value if isinstance(value, list) else [value]
        return [_as_setting(element, element_type) for element in elements]
    if kind is bool:
        return number_as_bool(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is int and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    return value


def number_as_bool(plain: Any) -> Any:
    """Returns the numbers 0 and 1 as false and true, and other values unchanged."""
    return bool(plain) if plain in (0, 1) else plain


def _plain_scalar(name: str, value: Any) -> Any:
    plain = os.fspath(value) if isinstance(value, os.PathLike) else _without_arrays(value)
    if _is_torch_device(plain):
        plain = str(plain)
    if plain is None or isinstance(plain, bool):
        return plain
    # A member of an Enum, or another instance of a subclass, becomes its plain value.
    if isinstance(plain, str):
        return _checked_text(name, str.__str__(plain))
    if isinstance(plain, int):
        if not fits_64_bits(plain):
            raise UserError(f"{name}: {TOO_LONG}")
        return int(plain)
    if isinstance(plain, float):
        return float(plain)
    kind = type(plain).__name__
    raise UserError(f"{name}: must be text, a number, or a list or mapping of these, got an object of type {kind}")


def _without_arrays(value: Any) -> Any:
    """Converts an array, a number or a tensor of NumPy or torch to lists or a number. Returns others unchanged."""
    has_tolist = hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if has_tolist else value


def _is_torch_device(value: Any) -> bool:
    """Returns whether ``value`` is a torch.device, without importing torch."""
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("torch", "device")


def _checked_text(name: str, text: str) -> str:
    """Returns ``text``. Raises UserError if it cannot be the name of a file or an argument of a process."""
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise UserError(f"{name}: {text!r} contains a NUL or an unpaired surrogate")
    return text
