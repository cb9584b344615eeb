"""Parses JSON of label files, reads numbers from it, and shows its values in messages."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from data.formats.label_format import LabelFileError, number
from utils.errors import one_line
from utils.files.encoding import EncodingError, decode_utf8

_NUMBERS = frozenset((int, float))


def parse_json(data: bytes) -> Any:
    """Parses a file. Raises LabelFileError if it is malformed or an object repeats a key."""
    try:
        return json.loads(decode_utf8(data), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise LabelFileError(f"malformed JSON ({error.msg}, column {error.colno})", error.lineno) from None
    except EncodingError as error:
        raise LabelFileError(str(error)) from None
    except ValueError as error:  # a repeated key, or a number of thousands of digits
        raise LabelFileError(f"malformed JSON ({str(error).split(';')[0]})") from None
    except RecursionError:
        raise LabelFileError("malformed JSON (nested too deeply)") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict. Raises ValueError for a repeated key, for which ``json`` would silently use the last value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key '{twice[:60]}' is used twice in one object")
    return content


def numbers(values: list[Any]) -> list[float]:
    """Returns the `number` of each value, an empty list if one has none."""
    if _NUMBERS.issuperset(map(type, values)):
        return values
    found = [value for value in map(number, values) if value is not None]
    return found if len(found) == len(values) else []


def shown(value: Any) -> str:
    """Returns a value as JSON, for messages."""
    return one_line(json.dumps(value, ensure_ascii=False))[:100]
