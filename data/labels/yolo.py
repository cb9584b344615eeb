"""YOLO txt: one file per image, one row per object, ``class cx cy w h`` or a polygon ``class x1 y1 x2 y2 x3 y3 ...``.

Coordinates are fractions of the image size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from pathlib import Path

from data.labels.clean import LabelFileError, RawLabels, RowProblem, is_plain_number_text
from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.label_format import ImageFile, LabelFile, LabelFormat, LabelPerImage, LabelSource


def parse_yolo(data: bytes, num_classes: int | None) -> RawLabels:
    """Parses a file to rows in fractions of the image size.

    Args:
        data: the file's bytes.
        num_classes: rows with this or a higher class are reported; None: every object is of class 0.

    Raises LabelFileError if the file is not text.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LabelFileError(f"not text ({error.reason} at byte {error.start})") from None
    labels = RawLabels([], [])
    is_plain = is_plain_number_text(text)
    for line, row in enumerate(text.splitlines(), 1):
        fields = row.split()
        if not fields:
            continue
        is_number = is_plain or is_plain_number_text("".join(fields))
        labels.add(_parse_row(fields, line, num_classes) if is_number else _not_numbers(fields, line))
    return labels


def _parse_row(fields: list[str], line: int, num_classes: int | None) -> tuple | RowProblem:
    try:
        values = [float(f) for f in fields]
    except ValueError:
        return _not_numbers(fields, line)
    count = len(values)
    if count != 5 and (count < 7 or count % 2 == 0):
        more = "; a confidence column?" if count == 6 else " or a class and at least 3 points"
        return RowProblem(line, BAD_ROW, f"{count} fields, expected 5 (class cx cy w h){more}")
    if not all(map(isfinite, values)):
        return RowProblem(line, NOT_FINITE, f"{' '.join(fields)[:60]!r}")
    class_id = values[0]
    if class_id != int(class_id):
        return RowProblem(line, BAD_ROW, f"class {fields[0]} is not a whole number")
    if class_id < 0 or (num_classes is not None and class_id >= num_classes):
        known = f"0 to {num_classes - 1}" if num_classes is not None else "0 and up"
        return RowProblem(line, UNKNOWN_CLASS, f"class {int(class_id)} is not among the classes ({known}); left out")
    if num_classes is None:
        class_id = 0
    if count == 5:
        _, cx, cy, w, h = values
        return (class_id, cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2, w * h, 0, line)
    xs, ys = values[1::2], values[2::2]
    return (class_id, min(xs), min(ys), max(xs), max(ys), polygon_area(xs, ys), 0, line)


def _not_numbers(fields: list[str], line: int) -> RowProblem:
    text = " ".join(fields)
    what = "not numbers"
    if "," in text:
        what = "fields are separated by commas, expected spaces"
    elif len(fields) > 1 and not any(c.isalpha() for c in "".join(fields[1:])):
        what = "the class is not a number; expected its position in the names, from 0"
    return RowProblem(line, BAD_ROW, f"{what}: {text[:60]!r}")


def polygon_area(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Area of a simple polygon (shoelace formula)."""
    twice = sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))
    return abs(twice) / 2


def _detect(annotations: Path | None) -> bool:
    return annotations is None


def _read(images: list[ImageFile], files: list[LabelFile], root: Path, names: tuple[str, ...] | None) -> LabelSource:
    parse = partial(parse_yolo, num_classes=None if names is None else len(names))
    return LabelPerImage(images, files, root, names, parse, normalized=True)


def _label_path(image: ImageFile, root: Path, annotations: Path | None, exists: Callable[[str], bool]) -> str:
    """Replaces the last folder ``images`` by ``labels``. Without such a folder, the label file is beside the image."""
    path = os.path.join(root, image.name)
    folders, separator, rest = path.rpartition(f"{os.sep}images{os.sep}")
    path = f"{folders}{os.sep}labels{os.sep}{rest}" if separator else path
    return os.path.splitext(path)[0] + ".txt"


YOLO = LabelFormat("yolo", "", _detect, _read, _label_path)
