"""Reads CSV files with a row for each object: of Open Images, and ``_annotations.csv`` of Roboflow and TensorFlow.

With ``ImageID`` corners are fractions, names of images have no suffix, and ``IsGroupOf`` 1 marks a region around
several objects; with ``filename`` corners are pixels of the stated size. The row number is the line.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from data.formats.label_format import (
    ANY_SUFFIX,
    Box,
    Classes,
    Entry,
    Format,
    LabelFileError,
    plain_float,
    rows_of,
    stated_size,
)
from utils.files.encoding import EncodingError, decode_utf8

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_HEADER = "filename,xmin,ymin,xmax,ymax,class"


def read_csv(data: bytes, classes: Classes) -> list[Entry]:
    """Returns the images. A row without an object makes a background. Raises LabelFileError for a malformed file."""
    try:
        lines = csv.DictReader(io.StringIO(decode_utf8(data), newline=""))
        columns = {name.strip().lower() for name in lines.fieldnames or ()}
        is_open_images = "imageid" in columns
        if not columns.issuperset(_CORNERS) or not (is_open_images or "filename" in columns):
            raise LabelFileError(f"has no header {_HEADER} (or ImageID, LabelName, XMin, ...)", 1)
        # An image has one stated size: rows with another one are another entry, which is lost.
        objects_of: dict[tuple[str, tuple[int, int] | None], list[tuple[int, dict[str, str]]]] = {}
        for line in lines:
            row = {str(key).strip().lower(): (value or "") for key, value in line.items() if isinstance(value, str)}
            image = row.get("imageid", "") + ANY_SUFFIX if is_open_images else row.get("filename", "")
            objects = objects_of.setdefault((image, stated_size(row.get("height"), row.get("width"))), [])
            if any(row.get(key) for key in (*_CORNERS, "labelname", "class")):
                objects.append((lines.line_num, row))
    except EncodingError as error:
        raise LabelFileError(str(error)) from None
    except csv.Error as error:
        raise LabelFileError(f"malformed CSV ({error})", lines.line_num + 1) from None
    return [
        Entry(rows_of(objects, _box, classes), image, size_hw, is_normalized=is_open_images)
        for (image, size_hw), objects in objects_of.items()
    ]


def _box(row: dict[str, Any]) -> Box:
    x1, y1, x2, y2 = (plain_float(row[key]) for key in _CORNERS)
    return Box(row.get("labelname") or row["class"], x1, y1, x2, y2, crowd=int(row.get("isgroupof") == "1"))


CSV = Format(
    name="csv",
    title="CSV",
    suffix=".csv",
    is_per_image=False,
    read=read_csv,
    signature=r"^(?=[^\n]*xmin)[^\n]*(class|labelname)",
)
