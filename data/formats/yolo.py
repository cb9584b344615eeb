"""Reads YOLO txt: one file per image, one row per object.

A row is ``class cx cy w h``, or a polygon ``class x1 y1 x2 y2 x3 y3 ...``, whose bounding box is used. Coordinates are
fractions of the image size.
"""

from __future__ import annotations

from math import isfinite

from data.findings import BAD_ROW, UNKNOWN_CLASS, Finding
from data.formats.label_format import Classes, Entry, Format, LabelFileError, Row
from utils.files.encoding import EncodingError, decode_utf8
from utils.strings import is_plain_number_text


def read_yolo(data: bytes, classes: Classes) -> list[Entry]:
    """Reads a file. The row number is the line. Raises LabelFileError if it is not text."""
    try:
        text = decode_utf8(data)
    except EncodingError as error:
        raise LabelFileError(str(error)) from None
    num_classes = None if classes.names is None else len(classes.names)
    rows: list[Row | Finding] = []
    is_plain = is_plain_number_text(text)
    for line, row in enumerate(text.splitlines(), 1):
        fields = row.split()
        if fields:
            rows.append(_read_row(fields, line, num_classes, is_plain=is_plain or is_plain_number_text(row)))
    return [Entry(rows, is_normalized=True)]


def _read_row(fields: list[str], line: int, num_classes: int | None, *, is_plain: bool) -> Row | Finding:
    """Returns the box or polygon of a row, or its problem."""
    try:
        values = [float(field) for field in fields] if is_plain else []
    except ValueError:
        values = []
    count = len(values)
    if not values:
        return Finding(BAD_ROW, f"not numbers separated by spaces: {' '.join(fields)[:60]!r}", row_number=line)
    if count != 5 and (count < 7 or count % 2 == 0):
        expected = "expected class cx cy w h, or a class and at least 3 points"
        return Finding(BAD_ROW, f"{count} fields, {expected}", row_number=line)
    if not all(map(isfinite, values)):
        return Finding(BAD_ROW, f"a number is not finite: {' '.join(fields)[:60]!r}", row_number=line)
    class_id = values[0]
    if class_id != int(class_id):
        return Finding(BAD_ROW, f"class {fields[0][:60]} is not a whole number", row_number=line)
    if count == 5:
        _, cx, cy, w, h = values
        corners = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
        area = w * h
    else:
        xs = values[1::2]
        ys = values[2::2]
        corners = (min(xs), min(ys), max(xs), max(ys))
        area = abs(sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))) / 2  # the shoelace formula
    if class_id < 0 or (num_classes is not None and class_id >= num_classes):
        text = f"class {fields[0][:60]}" + ("" if num_classes is None else f" of 0 to {num_classes - 1}")
        return Finding(UNKNOWN_CLASS, text, class_id=int(class_id), xyxy_px=corners, row_number=line)
    return (0 if num_classes is None else class_id, *corners, area, 0, line)


YOLO = Format(name="yolo", title="YOLO txt", suffix=".txt", is_per_image=True, read=read_yolo)
