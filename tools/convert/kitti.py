"""Reads KITTI's object benchmark: one text file per image, with one row per object."""

from __future__ import annotations

from pathlib import Path

from tools.convert.annotations import AnnotatedBox, Annotations, Entry
from tools.convert.values import number
from utils.errors import UserError
from utils.files.safe_io import read_text

NUM_FIELDS = 15  # a detection has one more field, its score


def read_kitti(file: Path, annotations: Annotations) -> None:
    """Adds the boxes of all rows: fields 5 to 8 are corners in pixels. ``DontCare`` is a region to ignore."""
    boxes = []
    for line, row in enumerate(read_text(file).splitlines(), 1):
        fields = row.split()
        location = f"{file}:{line}"
        if not fields:
            continue
        if len(fields) not in (NUM_FIELDS, NUM_FIELDS + 1):  # tracks of KITTI have other columns
            raise UserError(f"{location}: {len(fields)} fields, expected {NUM_FIELDS}, or one more with a score")
        for value in fields[1:4]:  # a class name with a space would shift all fields
            number(value, f"{location}: fields 2 to 4")
        x1, y1, x2, y2 = (number(value, location) for value in fields[4:8])
        boxes.append(AnnotatedBox(fields[0], x1, y1, x2, y2))
    annotations.ignored_names |= {box.name for box in boxes if box.name.lower() == "dontcare"}
    annotations.add(Entry(image=file.stem, boxes=boxes, location=str(file), file=file, is_complete=True))


def is_kitti(head: str) -> bool:
    """Returns whether a file that begins with ``head`` is KITTI's. Its rows begin with a class name, unlike rows of
    YOLO txt, in which a polygon of seven points has as many fields."""
    fields = head.split("\n")[0].split()
    return len(fields) >= NUM_FIELDS and not all(map(_is_number, fields))


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
