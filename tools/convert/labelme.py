"""Reads LabelMe's and X-AnyLabeling's JSON: one file per image."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from data.labels.json_files import load_json
from tools.convert.annotations import AnnotatedBox, Annotations, Entry, around_polygon, bounding_box
from tools.convert.values import image_name, name_of, parse_size, points_of
from utils.errors import UserError, one_line
from utils.files.paths import casefold_nfc as loose
from utils.schema import check

_WITHOUT_AREA = ("point", "points", "line", "linestrip")
_TWO_POINT_SHAPES = ("rectangle", "mask")  # opposite corners
_IGNORE = "__ignore__"  # class name of regions to ignore


def read_labelme(file: Path, annotations: Annotations) -> None:
    """Adds the rectangles, and the boxes around circles, masks and all shapes of three or more points (polygons,
    rotated rectangles, quadrilaterals, cuboids)."""
    location = str(file)
    content = check(load_json(file, "a LabelMe JSON"), dict, location)
    image = annotations.source_images.find(image_name(content.get("imagePath"), location), location, file)
    is_renamed = loose(image.stem) != loose(file.stem)  # or a copy, which still names the image of the original
    if is_renamed and annotations.source_images.has_stem(file.stem):
        raise UserError(f"{file}: its 'imagePath' is {image.name}, but another image has the name of this file")
    shapes = check(content.get("shapes"), list, f"{file}: shapes")
    boxes = [_box(shape, f"{file}: shape {position}", annotations) for position, shape in enumerate(shapes)]
    annotations.ignored_names.add(_IGNORE)
    size = parse_size(content.get("imageWidth"), content.get("imageHeight"), location)
    annotations.add(Entry(image=image, boxes=boxes, location=location, file=file, size=size, is_complete=True))


def _box(entry: Any, location: str, annotations: Annotations) -> AnnotatedBox | None:
    """Returns the box around a shape; None for one without area."""
    shape = check(entry, dict, location)
    name = name_of(shape.get("label"), f"{location}: label")
    kind = one_line(str(shape.get("shape_type") or "polygon"))[:60]
    points = points_of(shape.get("points"), location)
    if kind in _WITHOUT_AREA:
        annotations.skipped.add(kind, location)
        return None
    if kind == "circle" and len(points) == 2:
        (cx, cy), (x, y) = points
        radius = math.hypot(x - cx, y - cy)
        return AnnotatedBox(name, cx - radius, cy - radius, cx + radius, cy + radius)
    if kind in _TWO_POINT_SHAPES and len(points) == 2:
        return bounding_box(name, points)
    return around_polygon(name, points, kind, location)
