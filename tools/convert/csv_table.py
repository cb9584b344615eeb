"""Reads CSV files with a row for each object: of Open Images, and ``_annotations.csv`` of Roboflow and TensorFlow."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from tools.convert.entry import Box, Entry, parse_boxes
from utils.errors import UserError
from utils.files.safe_io import read_text

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read_csv(file: Path) -> Iterator[Entry]:
    """Yields the rows of a file. With ``ImageID`` corners are fractions, a class is an id whose name is in a file
    ``*class-descriptions*.csv`` beside it, and ``IsGroupOf`` 1 marks a group; with ``filename`` corners are pixels.
    Raises UserError for a malformed file."""
    descriptions = sorted(file.parent.glob("*class-descriptions*.csv"))
    names = {row[0]: row[1] for path in descriptions for row in csv.reader(io.StringIO(read_text(path))) if row[1:]}

    def box(row: dict[str, str]) -> Box:
        name = row.get("labelname") or row["class"]
        x1, y1, x2, y2 = (float(row[key]) for key in _CORNERS)
        return Box(names.get(name, name), x1, y1, x2, y2, row.get("isgroupof") == "1")

    lines = csv.DictReader(io.StringIO(read_text(file), newline=""))
    try:
        columns = {name.strip().lower() for name in lines.fieldnames or ()}
        if not columns.issuperset(_CORNERS) or not columns & {"imageid", "filename"}:
            raise UserError(
                f"{file}: has no columns ImageID or filename, xmin, ymin, xmax, ymax; is it a CSV of boxes?"
            )
        for line in lines:
            row = {str(key).strip().lower(): (value or "") for key, value in line.items() if isinstance(value, str)}
            is_open_images = "imageid" in row
            width = row.get("width", "")
            height = row.get("height", "")
            size_wh = (int(width), int(height)) if width.isdecimal() and height.isdecimal() else None
            has_object = any(row.get(key) for key in (*_CORNERS, "labelname", "class"))
            yield Entry(
                row.get("imageid" if is_open_images else "filename", ""),
                parse_boxes([row], box) if has_object else [],  # else a background
                f"{file}:{lines.line_num}",
                file,
                size_wh=size_wh,
                has_suffix=not is_open_images,
                is_normalized=is_open_images,
            )
    except csv.Error as error:
        raise UserError(f"{file}:{lines.line_num + 1}: malformed CSV ({error})") from None
