"""Defines label formats, and the rows that all of them are read into.

Each format is a module of this package with a `Format`, listed in `data.formats.table`. It reads a label file into
entries: an `Entry` is an image with its rows, and a row is a box or a `Finding`. Whether boxes fit into their images is
checked later, for a whole split at once (`data.geometry`), so that a data set has the same boxes in any format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import cos, hypot, isfinite, sin
from typing import Any, NamedTuple

import numpy as np

from data.findings import BAD_ROW, UNKNOWN_CLASS, Finding
from utils.errors import one_line
from utils.files.encoding import EncodingError, decode_utf8
from utils.strings import is_plain_number_text

MAX_BYTES = 1 << 26  # largest label file of one image
_MAX_SIDE = 2**31  # pixels; no format of images stores a larger one
ANY_SUFFIX = ".*"  # ends the name of an image whose label file leaves out the suffix

# Class, x1, y1, x2, y2, area, crowd, row number. The row number locates the row in its file: its line, from 1, or the
# position of an object, from 0.
Row = tuple[float, ...]
# Columns of a row table: the image's number, then those of `Row`.
IMAGE, CLASS, X1, Y1, X2, Y2, AREA, CROWD, ROW_NUMBER = range(9)


class Entry(NamedTuple):
    """An image in a label file."""

    rows: list[Row | Finding]  # in file order; findings without `where` and `image`
    image: str = ""  # its file name as written; empty in formats with a file per image
    size_hw: tuple[int, int] | None = None  # according to the file
    image_id: int | str | None = None
    is_normalized: bool = False  # whether coordinates are fractions of the image's size, not pixels


class LabelFileError(Exception):
    """Raised if a label file is entirely unusable."""

    def __init__(self, reason: str, line: int = -1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line  # line to correct, or -1


class Classes:
    """Numbers the classes of label files as in ``names``, or all 0 if it is None, and collects their names and ids."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self.names = names
        self.seen: set[str] = set()  # names of the objects read so far
        self.id_of_category: dict[str, int] = {}  # by name, of a COCO JSON; those with annotations first
        self._number_of = {name: i for i, name in enumerate(names or ())}

    def number(self, name: str) -> int | None:
        """Returns the number of a class, None for an unknown one."""
        self.seen.add(name)
        return 0 if self.names is None else self._number_of.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A label format. All functions are module-level functions, so that a format can be pickled."""

    name: str  # part of the fingerprint of an index
    title: str  # for messages
    suffix: str  # of its files, lower case
    is_per_image: bool  # whether each image has a label file; else a split has one for all images
    read: Callable[[bytes, Classes], Iterable[Entry]]  # raises LabelFileError
    signature: str = ""  # regex that identifies the format by the first part of a file, in lower case
    # Class names in a file, ordered by id; None: the names of its objects, sorted. YOLO has no names.
    class_names: Callable[[bytes], tuple[str, ...]] | None = None


class Box(NamedTuple):
    """A labeled object whose class has a name."""

    name: Any
    x1: float
    y1: float
    x2: float
    y2: float
    crowd: int = 0
    area: float | None = None  # None: that of the box


def rows_of(objects: Iterable[tuple[int, Any]], parse: Callable[[Any], Box], classes: Classes) -> list[Row | Finding]:
    """Returns a row for each object, which has a row number. ``parse`` raises ValueError for one that is no box."""
    rows: list[Row | Finding] = []
    for row_number, item in objects:
        try:
            name, x1, y1, x2, y2, crowd, area = parse(item)
            name = str(name).strip() if isinstance(name, str | int) else ""
            if not name or name != one_line(name):
                raise ValueError("object without the name of a class")
            if not isfinite(x1 + y1 + x2 + y2):
                raise ValueError(f"a number is not finite: {x1:g}, {y1:g}, {x2:g}, {y2:g}")
        except ValueError as error:
            rows.append(Finding(BAD_ROW, one_line(str(error))[:200], row_number=row_number))
            continue
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            rows.append(Finding(BAD_ROW, one_line(f"malformed object ({error!r})")[:200], row_number=row_number))
            continue
        class_id = classes.number(name)
        if class_id is None:
            rows.append(Finding(UNKNOWN_CLASS, f"'{name}'", xyxy_px=(x1, y1, x2, y2), row_number=row_number))
            continue
        if area is None:
            area = (x2 - x1) * (y2 - y1)
        rows.append((class_id, x1, y1, x2, y2, area, crowd, row_number))
    return rows


def box_around(name: Any, points: Iterable[Sequence[Any]]) -> Box:
    """Returns the box around two opposite corners, or around the points of a shape. Raises ValueError for a point."""
    xs, ys = zip(*((float(x), float(y)) for x, y in points))
    if len(xs) < 2:
        raise ValueError("a point has no area")
    return Box(name, min(xs), min(ys), max(xs), max(ys))


def half_sides_of_rotated(half_w: float, half_h: float, angle: float, *, is_round: bool) -> tuple[float, float]:
    """Returns half the sides of the box around a rectangle or an ellipse that is rotated about its center. ``angle``:
    in radians."""
    c = abs(cos(angle))
    s = abs(sin(angle))
    if is_round:
        return hypot(half_w * c, half_h * s), hypot(half_w * s, half_h * c)
    return half_w * c + half_h * s, half_w * s + half_h * c


def plain_float(text: str) -> float:
    """Converts text as other programs do. Raises ValueError for what only Python's float accepts, such as ``1_0``."""
    if not is_plain_number_text(text):
        raise ValueError(f"{text[:60]!r} is not a number")
    return float(text)


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


def stated_size(height: Any, width: Any) -> tuple[int, int] | None:
    """Returns the height and width that a file states for an image; None without one, or for sides that no image has,
    such as the zeros of some tools."""
    sides = [number(side) for side in (height, width)]
    sizes = [int(side) for side in sides if side is not None and 0 < side < _MAX_SIDE and side == int(side)]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else None


def row_table(image: int, rows: list[Row]) -> np.ndarray:
    """Returns the rows of an image as float64 (R, 9)."""
    return np.array([(image, *row) for row in rows], np.float64).reshape(-1, ROW_NUMBER + 1)


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


def shown(value: Any) -> str:
    """Returns a value as JSON, for messages."""
    return one_line(json.dumps(value, ensure_ascii=False))[:100]
