"""Reads YOLO txt: one file per image, one row per object.

A row is ``class cx cy w h``, or a polygon ``class x1 y1 x2 y2 x3 y3 ...``, whose bounding box is used. Coordinates are
fractions of the image size.
"""

from __future__ import annotations

import re
from functools import partial
from math import isfinite

from data.labels.findings import BAD_ROW, UNKNOWN_CLASS, Finding
from data.labels.label_format import (
    LabelFileError,
    LabelFormat,
    LabelPerImage,
    LabelRow,
    LabelSource,
    Listing,
    RawLabels,
    shape_of,
)
from utils.files.encoding import EncodingError, decode_utf8
from utils.strings import is_plain_number_text

_ROUNDING = 1e-6  # a polygon that fills its box up to this fraction is the box itself
# A class and four numbers, possibly after a byte order mark.
_ROW = re.compile(rb"^[\s\x80-\xff]*\d+(\.0*)?([^\S\n]+[-+.\deE]+){4,}\s*$", re.MULTILINE)
_Geometry = tuple[tuple[float, float, float, float], float, int]  # corners, area, and `shape_of` a polygon; 0 for a box


def parse_yolo(data: bytes, num_classes: int | None) -> RawLabels:
    """Parses a file into rows in fractions of the image size. ``num_classes``: rows with this or a higher class index
    are reported; if None, every object is of class 0. Raises LabelFileError if the file is not text."""
    try:
        text = decode_utf8(data)
    except EncodingError as error:
        raise LabelFileError(str(error)) from None
    labels = RawLabels([], [])
    is_plain = is_plain_number_text(text)
    for line, row in enumerate(text.splitlines(), 1):
        fields = row.split()
        if not fields:
            continue
        if is_plain or is_plain_number_text(row):
            labels.add(_parse_row(fields, line, num_classes))
        else:
            labels.add(_not_numbers(fields, line))
    return labels


def _parse_row(fields: list[str], line: int, num_classes: int | None) -> LabelRow | Finding:
    """Returns the box or polygon of a row, or its problem."""
    try:
        values = [float(field) for field in fields]
    except ValueError:
        return _not_numbers(fields, line)
    count = len(values)
    if count != 5 and (count < 7 or count % 2 == 0):
        reason = f"{count} fields, expected class cx cy w h, or a class and at least 3 points"
        if count == 6:
            reason += "; detect.py --save-conf adds a confidence, which no label has"
        return Finding(BAD_ROW, reason, row_number=line)
    if not all(map(isfinite, values)):
        return Finding(BAD_ROW, f"a number is not finite: {' '.join(fields)[:60]!r}", row_number=line)
    class_id = values[0]
    if class_id != int(class_id):
        return Finding(BAD_ROW, f"class {fields[0][:60]} is not a whole number", row_number=line)
    corners, area, shape = _box(*values[1:]) if count == 5 else _polygon(values[1:])
    if class_id < 0 or (num_classes is not None and class_id >= num_classes):
        text = f"class {fields[0][:60]}" + ("" if num_classes is None else f" of 0 to {num_classes - 1}")
        return Finding(UNKNOWN_CLASS, text, class_id=int(class_id), xyxy_px=corners, row_number=line)
    class_id = 0 if num_classes is None else class_id
    return (class_id, *corners, area, 0, line, shape)


def _box(cx: float, cy: float, w: float, h: float) -> _Geometry:
    """Returns the geometry of a box, in fractions of the image size."""
    return (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2), w * h, 0


def _polygon(values: list[float]) -> _Geometry:
    """Returns the geometry of the polygon ``x1 y1 x2 y2 x3 y3 ...``: corners of its bounding box, area and shape."""
    xs = values[0::2]
    ys = values[1::2]
    twice_area = sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))  # the shoelace formula
    corners = (min(xs), min(ys), max(xs), max(ys))
    area = abs(twice_area) / 2
    box_area = (corners[2] - corners[0]) * (corners[3] - corners[1])
    is_box = area >= (1 - _ROUNDING) * box_area
    return corners, area, 0 if is_box else shape_of(values)


def _not_numbers(fields: list[str], line: int) -> Finding:
    return Finding(BAD_ROW, f"not numbers separated by spaces: {' '.join(fields)[:60]!r}", row_number=line)


def _read(listing: Listing, names: tuple[str, ...] | None) -> LabelSource:
    parse = partial(parse_yolo, num_classes=None if names is None else len(names))
    return LabelPerImage(listing, parse, normalized=True)


def _num_rows(data: bytes) -> int:
    """Counts the rows of a file. A file without any row of a class and four numbers, such as a list of class names, has
    none."""
    text = data.replace(b"\0", b"")  # dropping zeros also matches UTF-16
    return sum(not line.isspace() for line in text.splitlines(keepends=True)) if _ROW.search(text) else 0


YOLO = LabelFormat(
    name="yolo", suffix=".txt", is_per_image=True, in_annotations=False, read=_read, num_objects=_num_rows
)
