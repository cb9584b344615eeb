"""Values of Python as plain data, which JSON and YAML can hold, and their types."""

from __future__ import annotations

import os
from collections.abc import KeysView, Mapping, Sequence, ValuesView
from typing import Any

from utils.errors import UserError
from utils.schema import check, parse_hint


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
        plain = number_as_bool(plain)
    return None if plain is None and is_optional else check(plain, kind, name, bounds)


def number_as_bool(plain: Any) -> Any:
    """Returns false and true for 0 and 1, and other values unchanged."""
    return bool(plain) if plain in (0, 1) else plain
