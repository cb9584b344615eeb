"""Reads values of annotation files: numbers, flags, lists and sizes, with errors that name their location."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.images.verify import check_image
from utils.errors import UserError, one_line
from utils.schema import check

MAX_FILE_BYTES = 1 << 32  # largest annotation file
_SET = ("1", "1.0", "true")
_NOT_SET = ("", "0", "0.0", "false", "-1", "-1.0")  # Open Images writes the last ones for unknown


def number(value: Any, location: str) -> float:
    """Converts a number, or a string with a number, to a float. Raises UserError unless it is finite."""
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise UserError(f"{location}: expected a number, got {one_line(str(value))[:60]!r}")
    return result


def numbers(values: Mapping[str, Any], keys: tuple[str, ...], location: str) -> list[float]:
    """Returns the numbers stored under ``keys``. Raises UserError that names the key."""
    return [number(values.get(key), f"{location}: {key}") for key in keys]


def parse_flag(value: Any, location: str) -> bool:
    """Returns whether a flag, a number or a string, is set; a missing one (None) is not. Raises UserError for other
    values."""
    text = "" if value is None else str(value).strip().lower()
    if text not in _SET + _NOT_SET:
        raise UserError(f"{location}: expected 0 or 1, got {one_line(text)[:60]!r}")
    return text in _SET


def parse_object(row: str, location: str) -> dict[str, Any]:
    """Parses a line of a file with one JSON object per line. Raises UserError."""
    try:
        value = json.loads(row)
    except (ValueError, RecursionError):
        raise UserError(f"{location}: malformed JSON") from None
    return check(value, dict, location)


def objects_in(content: dict[str, Any], key: str, location: str) -> list[dict[str, Any]]:
    """Returns the list of JSON objects that ``content`` has under ``key``. Raises UserError."""
    return [check(item, dict, location) for item in check(content.get(key), list, f"{location}: {key}")]


def points_of(value: Any, location: str) -> list[tuple[float, float]]:
    """Converts a list of pairs of numbers to points. Raises UserError."""
    points = []
    for pair in check(value, list, location):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{location}: expected points of two numbers, got {one_line(str(pair))[:60]!r}")
        x, y = pair
        points.append((number(x, location), number(y, location)))
    return points


def parse_size(width: Any, height: Any, location: str) -> tuple[int, int] | None:
    """Returns width and height of an image in the annotations; None unless both are present and positive, because some
    tools write 0 or -1 for an unknown size."""
    if width in (None, "") or height in (None, ""):
        return None
    size = int(number(width, f"{location}: width")), int(number(height, f"{location}: height"))
    return size if min(size) > 0 else None


def name_of(value: Any, location: str) -> str:
    """Returns the name of a class or an image: text, or a whole number in digits; "" if it is missing (None). Raises
    UserError for other values."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if type(value) is not int:
        raise UserError(f"{location}: expected a name, got {one_line(json.dumps(value))[:60]}")
    return str(value)


def image_name(value: Any, location: str) -> str:
    """Returns the name of an image. Raises UserError if it is missing, or no name."""
    name = name_of(value, location)
    if not name:
        raise UserError(f"{location}: has no image name")
    return name


def image_size(path: Path) -> tuple[int, int]:
    """Returns width and height of an image file."""
    height, width = check_image(path).size_hw
    return width, height
