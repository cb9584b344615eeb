"""Reads JSON files, and shows their values in messages."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from utils.errors import UserError, one_line
from utils.files.safe_io import read_text
from utils.strings import is_plain_number_text

_NUMBERS = frozenset((int, float))


def load_json(path: Path, expected: str) -> dict[str, Any] | list[Any]:
    """Reads a JSON file that contains an object or a list. Raises UserError if it is malformed or an object repeats a
    key. ``expected``: description of the expected file, for the message about another kind of file."""
    text = read_json(path, expected)
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: malformed JSON ({error.msg}, column {error.colno})") from None
    except ValueError as error:  # a repeated key, or a number of thousands of digits
        raise UserError(f"{path}: malformed JSON ({str(error).split(';')[0]})") from None
    except RecursionError:
        raise UserError(f"{path}: malformed JSON (nested too deeply)") from None


def read_json(path: Path, expected: str) -> str:
    """Reads the text of a file. Raises UserError unless it begins like a JSON object or list."""
    text = read_text(path)
    if not text[:4096].lstrip().startswith(("{", "[")):
        raise UserError(f"{path}: not {expected}")
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict. Raises ValueError for a repeated key, for which ``json`` would silently use the last value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key '{twice[:60]}' is used twice in one object")
    return content


def number(value: Any) -> int | float | None:
    """Returns a number, also one in text, as Roboflow writes some; None for any other value."""
    if type(value) in (int, float):
        return value
    if not isinstance(value, str) or not is_plain_number_text(value):
        return None
    try:
        return int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
    except ValueError:  # no number, or one of thousands of digits
        return None


def numbers(values: list[Any]) -> list[float]:
    """Returns the `number` of each value, an empty list if one has none."""
    if _NUMBERS.issuperset(map(type, values)):
        return values
    found = [value for value in map(number, values) if value is not None]
    return found if len(found) == len(values) else []


def shown(value: Any) -> str:
    """Returns a value as JSON, for messages."""
    return one_line(json.dumps(value, ensure_ascii=False))[:100]
