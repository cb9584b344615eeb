"""Values of settings: as plain data, which JSON and YAML can hold, converted to the type of a setting, and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import typing
from collections.abc import KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any

from utils.address import as_address
from utils.config.settings import default_of
from utils.errors import UserError
from utils.schema import check, hints_of, parse_hint, type_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
    if isinstance(value, Mapping):
        return {plain_value(name, key): plain_value(name, item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)  # their own order changes from process to process
    if isinstance(value, Sequence | KeysView | ValuesView) and not isinstance(value, str | bytes | bytearray):
        return [plain_value(name, item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if f"{type(value).__module__}.{type(value).__name__}" == "torch.device":
        return str(value)
    kind_name = type(value).__name__
    raise UserError(f"{name}: must be text, a number, or a list or mapping of these, got an object of type {kind_name}")


def checked_value(name: str, value: Any, hint: Any) -> Any:
    """Returns the `plain_value` of a keyword, checked against its type ``hint``. Raises UserError that begins with
    ``name``."""
    kind, is_optional, bounds = parse_hint(hint)
    plain = plain_value(name, value)
    if kind is bool:
        plain = _number_as_bool(plain)
    return None if plain is None and is_optional else check(plain, kind, name, bounds)


def checked_setting(owner: type[DataclassInstance], name: str, value: Any, location: str) -> Any:
    """Returns the value of the setting ``name`` of ``owner``, converted and checked. ``value``: a `plain_value`, or
    the words of a command line; one word is not wrapped in a list. Raises UserError that begins with ``location``."""
    field = owner.__dataclass_fields__[name]
    convert = field.metadata["usage"].convert
    value = _converted(value if convert is None else convert(value, location), field, type_of(field, owner))
    value = check(value, hints_of(owner)[name], location, field.metadata["bounds"])
    return as_address(value) if isinstance(value, str) else value


def _converted(value: Any, field: dataclasses.Field, kind: Any) -> Any:
    """Converts a value to the type of a setting: numbers to text and text to numbers, one value to a list, 0 and 1 to
    false and true, true and false of a setting that is no switch to the value of its flag alone and its default, and
    words to the case of the choices. Returns others unchanged, for `check` to refuse."""
    if typing.get_origin(kind) is list:
        (element_type,) = typing.get_args(kind)
        elements = value if isinstance(value, list) else [value]
        return [_converted(element, field, element_type) for element in elements]
    if kind is bool:
        return _number_as_bool(value)
    if isinstance(value, bool) and field.metadata["usage"].const is not None:
        return field.metadata["usage"].const if value else default_of(field)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is int and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    choices = field.metadata["bounds"].choices or ()
    return next((c for c in choices if isinstance(value, str) and c.lower() == value.lower()), value)


def _number_as_bool(plain: Any) -> Any:
    """Returns false and true for 0 and 1, and other values unchanged."""
    return bool(plain) if plain in (0, 1) else plain
