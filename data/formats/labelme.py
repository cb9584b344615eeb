"""Reads LabelMe's and X-AnyLabeling's JSON: one file for each image. The row number is the position of a shape."""

from __future__ import annotations

import math
from typing import Any

from data.formats.label_format import (
    Box,
    Classes,
    Entry,
    Format,
    LabelFileError,
    box_around,
    parse_json,
    rows_of,
    stated_size,
)


def read_labelme(data: bytes, classes: Classes) -> list[Entry]:
    """Reads a file. Raises LabelFileError for a malformed one."""
    content = parse_json(data)
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        raise LabelFileError("has no list 'shapes'; is it a LabelMe JSON?")
    rows = rows_of(enumerate(content["shapes"]), _box, classes)
    return [Entry(rows, size_hw=stated_size(content.get("imageHeight"), content.get("imageWidth")))]


def _box(shape: Any) -> Box:
    """Returns the box around a shape. Raises ValueError for a point or a line."""
    kind = shape.get("shape_type") or "polygon"
    points = shape["points"]
    if kind in ("point", "points", "line", "linestrip"):
        raise ValueError(f"a {kind} has no area")
    if kind == "circle":  # its center, and a point on it
        (cx, cy), (x, y) = points
        radius = math.hypot(x - cx, y - cy)
        points = [(cx - radius, cy - radius), (cx + radius, cy + radius)]
    return box_around(shape["label"], points)


LABELME = Format(name="labelme", title="LabelMe JSON", suffix=".json", is_per_image=True, read=read_labelme)
