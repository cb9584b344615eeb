"""Reads YOLO txt: one file per image, one row per object.

A row is ``class cx cy w h``, or a polygon ``class x1 y1 x2 y2 x3 y3 ...``. Coordinates are fractions of the image size.
"""

from __future__ import annotations

import contextlib
import os
import re
from functools import partial
from math import isfinite
from pathlib import Path

import numpy as np

from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.label_format import (
    CENTERS,
    MAX_BYTES,
    FilesPerImage,
    LabelFormat,
    LabelPerImage,
    LabelRequest,
    LabelSource,
)
from data.labels.rows import LabelFileError, LabelRow, RawLabels, RowProblem, is_plain_number_text, shape_of
from data.split_files import LabelFile
from utils.errors import UserError
from utils.files.encoding import EncodingError, decode_loosely, decode_utf8
from utils.files.paths import path_of
from utils.files.safe_io import read_regular
from utils.strings import counted

_SAMPLED = 32  # label files searched for keypoints
_ROUNDING = 1e-6  # a polygon that fills its box up to this fraction is the box itself
_ROW = re.compile(r"\s*\d+(\.0*)?([^\S\n]+[-+.\deE]+){4,}\s*(\n|$)")
_MAX_SHOWN_CLASS = 1e15  # larger class indices are abbreviated
_MIN_KEYPOINT_ROWS = 20  # with fewer rows, keypoints without visibility cannot be distinguished from polygons


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
        is_number = is_plain or is_plain_number_text("".join(fields))
        labels.add(_parse_row(fields, line, num_classes) if is_number else _not_numbers(fields, line))
    return labels


def _parse_row(fields: list[str], line: int, num_classes: int | None) -> LabelRow | RowProblem:
    """Returns the box or polygon of a row, or its problem."""
    try:
        values = [float(field) for field in fields]
    except ValueError:
        return _not_numbers(fields, line)
    count = len(values)
    if count != 5 and (count < 7 or count % 2 == 0):
        hint = "; a confidence column?" if count == 6 else " or a class and at least 3 points"
        return RowProblem(line, BAD_ROW, f"{count} fields, expected 5 (class cx cy w h){hint}")
    if not all(map(isfinite, values)):
        return RowProblem(line, NOT_FINITE, f"{' '.join(fields)[:60]!r}")
    class_id = values[0]
    if class_id != int(class_id):
        return RowProblem(line, BAD_ROW, f"class {fields[0][:60]} is not a whole number")
    corners, area, shape = _box(*values[1:]) if count == 5 else _polygon(values[1:])
    if class_id < 0 or (num_classes is not None and class_id >= num_classes):
        known = f"0 to {num_classes - 1}" if num_classes is not None else "0 and up"
        class_name = f"class {int(class_id)}" if abs(class_id) < _MAX_SHOWN_CLASS else f"class {class_id:g}"
        return RowProblem(
            row_number=line,
            kind=UNKNOWN_CLASS,
            text=f"{class_name} is not among the classes ({known})",
            consequence="left out",
            class_id=int(class_id),
            class_name=class_name,
            xyxy=corners,
        )
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


def _not_numbers(fields: list[str], line: int) -> RowProblem:
    """Returns the problem of a row with a field that is not a number."""
    row = " ".join(fields)
    reason = "not numbers"
    if "," in row:
        reason = "fields are separated by commas, expected spaces"
        if len(fields) >= 5 and "." not in row:
            reason = "numbers have commas, expected points"
    elif len(fields) > 1 and not any(c.isalpha() for c in "".join(fields[1:])):
        reason = "the class is not a number; expected its position in the names, from 0"
    return RowProblem(line, BAD_ROW, f"{reason}: {row[:60]!r}", cause=reason)


def _check_no_keypoints(files: list[LabelFile], root: Path) -> None:
    """Raises UserError if the rows are boxes with keypoints, ``class cx cy w h x1 y1 v1 ...`` or without ``v``."""
    existing = [file for file in files if file.stamp and file.stamp.size]
    rows = _sampled_rows(existing[:: len(existing) // _SAMPLED + 1], root)
    size = _keypoint_size(rows)
    if not size:
        return
    num_fields = rows.shape[1]
    keypoints = counted((num_fields - 5) // size, "keypoint")
    raise UserError(
        f"{path_of(existing[0].name, root)}: each row has {num_fields} fields, a box and {keypoints} of {size} "
        "numbers; only bounding boxes are supported: keep the first 5 fields of each row"
    )


def _sampled_rows(files: list[LabelFile], root: Path) -> np.ndarray:
    """Returns the numbers of all rows in ``files``, float64 (R, F). Returns an empty array, (0, 0), if their lengths
    differ, as in polygons or a mixture of polygons and boxes."""
    rows: list[list[float]] = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # the scan reports what is wrong with the file
            text = read_regular(path_of(file.name, root), max_bytes=MAX_BYTES).decode("utf-8-sig")
            rows += [[float(field) for field in row.split()] for row in text.splitlines() if row.strip()]
        if len({len(row) for row in rows}) > 1:
            return np.zeros((0, 0))
    return np.array(rows) if rows else np.zeros((0, 0))


def _keypoint_size(rows: np.ndarray) -> int:
    """Returns the numbers per keypoint of rows, float64 (R, F): 3 with visibilities, 2 without, 0 for other rows.

    Visibilities are 0, 1 or 2, and no polygon has the coordinate 2 or an even number of fields. Without visibilities,
    all points are in the box given by the first two, and the second, the size of the box, is usually far from the other
    points, unlike a corner of a polygon.
    """
    count, num_fields = rows.shape
    if num_fields < 7 or not np.isfinite(rows).all():
        return 0
    num_extra = num_fields - 5
    visibility = rows[:, 7::3]
    has_visibilities = num_extra % 3 == 0 and np.isin(visibility, (0, 1, 2)).all()
    if has_visibilities and (num_extra % 2 or (visibility == 2).any()):
        return 3
    if num_extra % 2 == 0 and count >= _MIN_KEYPOINT_ROWS and _are_keypoints(rows[:, 1:].reshape(count, -1, 2)):
        return 2
    return 0


def _are_keypoints(points: np.ndarray) -> bool:
    """Returns whether rows, float64 (R, P, 2), are a box's center, size and P - 2 keypoints rather than polygons."""
    center, size, rest = points[:, :1], points[:, 1:2], points[:, 2:]
    others = np.concatenate([center, np.where((rest == 0).all(2, keepdims=True), center, rest)], 1)  # 0, 0: not labeled
    is_inside = (np.abs(others - center) <= size / 2 + 0.01) & (np.abs(center - 0.5) <= 0.5 - size / 2 + 0.01)
    low, high = others.min(1), others.max(1)
    is_far = (np.maximum(low - size[:, 0], size[:, 0] - high) > high - low).any(1)
    return bool(is_inside.all((1, 2)).mean() > 0.95 and is_far.mean() > 0.5)


def _read(request: LabelRequest) -> LabelSource:
    _check_no_keypoints(request.files, request.root)
    parse = partial(parse_yolo, num_classes=None if request.names is None else len(request.names))
    return LabelPerImage(request, parse, normalized=True)


def label_folders(images: str) -> list[str]:
    """Returns the folders that may contain the label files of the images in a folder, the usual one first.

    The usual folder has ``labels`` in place of the last ``images`` in the path; for a path without ``images``, label
    files are next to the images. Other programs may put them next to the images in any case, replace another
    ``images``, or write ``Images`` and ``Labels``.
    """
    parts = images.split(os.sep)
    positions = [i for i, part in enumerate(parts) if part.lower() == "images"]
    exact = [i for i in positions if parts[i] == "images"]
    usual = _replaced(parts, exact[-1:], "labels")
    others = [_replaced(parts, [i], word) for i in reversed(positions) for word in ("labels", "Labels", "LABELS")]
    if len(exact) > 1:
        others.append(_replaced(parts, exact, "labels"))
    return list(dict.fromkeys((usual, images, *others)))


def folder_with_labels(images: str) -> str:
    """Returns an image folder, or its real path if it is reached through symbolic links and only the real path has a
    label folder."""
    real = os.path.realpath(images)
    if real == images or _has_label_folder(images) or not _has_label_folder(real):
        return images
    return real


def _has_label_folder(images: str) -> bool:
    return any(os.path.isdir(folder) for folder in label_folders(images) if folder != images)


def _replaced(parts: list[str], positions: list[int], word: str) -> str:
    return os.sep.join(word if i in positions else part for i, part in enumerate(parts))


def _yolo_folders(images: str, below_split: str, annotations: Path | None) -> list[str]:
    """Returns `label_folders`, which depend on neither the folder within the split nor 'annotations'."""
    return label_folders(images)


def has_row(head: bytes) -> bool:
    """Returns whether a file that begins with ``head`` begins with a row of YOLO txt."""
    return _ROW.match(decode_loosely(head)) is not None


def _num_rows(data: bytes) -> int:
    return sum(not row.isspace() for row in data.splitlines(keepends=True))


_FILES = FilesPerImage(
    suffix=".txt", is_labels=has_row, advice="{move}", label_folders=_yolo_folders, num_objects=_num_rows
)
YOLO = LabelFormat("yolo", CENTERS, _read, _FILES)
