"""Reads the JSON of the VGG Image Annotator (VIA 2): its annotations, or a whole project."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from data.formats.label_format import (
    Box,
    Classes,
    Entry,
    Format,
    LabelFileError,
    box_around,
    half_sides_of_rotated,
    parse_json,
    rows_of,
)

_CLASS_ATTRIBUTES = ("class", "label", "name", "type")
_ONLY_CLASS = "object"  # of regions without attributes, as in the balloon data set of Mask R-CNN


def read_via(data: bytes, classes: Classes) -> Iterator[Entry]:
    """Yields the images. Row numbers count all regions. Raises LabelFileError for other files."""
    content = parse_json(data)
    if isinstance(content, dict):
        content = content.get("_via_img_metadata", content)
    images = list(content.values()) if isinstance(content, dict) else []
    if not all(isinstance(image, dict) and isinstance(image.get("filename"), str) for image in images):
        raise LabelFileError("not annotations of VIA: expected images with 'filename' and 'regions'")
    numbers = itertools.count()
    for image in images:
        regions = image.get("regions") or []
        regions = regions.values() if isinstance(regions, dict) else regions  # VIA 1 numbers them
        numbered = [(next(numbers), region) for region in regions]
        yield Entry(rows_of(numbered, _box, classes), image["filename"])


def _box(region: Any) -> Box:
    """Returns the box around a region. Raises ValueError for a point or a line."""
    shape = region["shape_attributes"]
    name = _class_name(region["region_attributes"])
    kind = shape["name"]
    if kind == "rect":
        x, y, w, h = (float(shape[key]) for key in ("x", "y", "width", "height"))
        return Box(name, x, y, x + w, y + h, area=w * h)
    if kind in ("circle", "ellipse"):
        rx, ry = (float(shape.get(key, shape.get("r"))) for key in ("rx", "ry"))
        half_w, half_h = half_sides_of_rotated(rx, ry, float(shape.get("theta", 0)), is_round=True)
        return Box(name, shape["cx"] - half_w, shape["cy"] - half_h, shape["cx"] + half_w, shape["cy"] + half_h)
    if kind != "polygon":
        raise ValueError(f"a {kind} has no area")
    return box_around(name, zip(shape["all_points_x"], shape["all_points_y"]))


def _class_name(attributes: dict[str, Any]) -> Any:
    """Returns the value of the only attribute that has one, or of the first of `_CLASS_ATTRIBUTES`; of a checkbox, the
    chosen option. Raises ValueError if there are several."""
    values = {key: value for key, value in attributes.items() if value not in ("", None, {})}
    if not values:
        return _ONLY_CLASS
    named = [key for key in _CLASS_ATTRIBUTES if key in values]
    if not named and len(values) > 1:
        raise ValueError(
            f"which attribute is the class? Call one {' or '.join(_CLASS_ATTRIBUTES)}: {', '.join(values)}"
        )
    value = values[(named or [*values])[0]]
    if not isinstance(value, dict):
        return value
    options = [option for option, is_chosen in value.items() if is_chosen]
    if len(options) != 1:
        raise ValueError(f"{len(options)} options are chosen where one is the class")
    return options[0]


VIA = Format(
    name="via", title="VIA JSON", suffix=".json", is_per_image=False, read=read_via, signature='"file_attributes"'
)
