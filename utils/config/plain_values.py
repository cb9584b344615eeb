"""Values of keyword arguments as plain data, which JSON and YAML can hold, and their types."""

from __future__ import annotations

import os
from collections.abc import KeysView, Mapping, Sequence, ValuesView
from typing import Any

from utils.config.yaml_files import MAX_DEPTH
from utils.errors import UserError
from utils.schema import TOO_LONG, check, fits_64_bits, parse_hint


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
