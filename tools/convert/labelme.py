"""Reads LabelMe's and X-AnyLabeling's JSON: one file for each image."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.labels.json_files import load_json
from tools.convert.entry import Box, Entry, box_around, parse_boxes
from utils.errors import UserError


def read_labelme(file: Path) -> Iterator[Entry]:
    """Yields the image of a file. Raises UserError for a malformed one."""
    content = load_json(file, "a LabelMe JSON")
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        raise UserError(f"{file}: has no list 'shapes'; is it a LabelMe JSON?")
    width = content.get("imageWidth")
    height = content.get("imageHeight")
    size_wh = (width, height) if type(width) is type(height) is int else None
    boxes = parse_boxes(content["shapes"], _box)
    yield Entry(str(content.get("imagePath")), boxes, str(file), file, size_wh=size_wh)


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
