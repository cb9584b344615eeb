"""Reads the JSON of the VGG Image Annotator (VIA 2): its annotations, or a whole project."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from data.formats.json_text import parse_json
from data.formats.label_format import Box, Classes, Entry, Format, LabelFileError, box_around, rows_of

_ONLY_CLASS = "object"  # of regions without attributes, as in the balloon data set of Mask R-CNN


def read_via(data: bytes, classes: Classes) -> Iterator[Entry]:
    """Yields the images. The class of a region is its first attribute with a text. Row numbers count all regions.
    Raises LabelFileError for other files."""
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
        yield Entry(rows_of(zip(numbers, regions), _box, classes), image["filename"])


def _box(region: Any) -> Box:
    """Returns the box around a region. Raises ValueError for a point or a line."""
    shape = region["shape_attributes"]
    texts = [value for value in region["region_attributes"].values() if value and isinstance(value, str)]
    name = texts[0] if texts else _ONLY_CLASS
    kind = shape["name"]
    if kind == "rect":
        x, y, w, h = (float(shape[key]) for key in ("x", "y", "width", "height"))
        return Box(name, x, y, x + w, y + h, area=w * h)
    if kind in ("circle", "ellipse"):
        rx, ry = (float(shape.get(key, shape.get("r"))) for key in ("rx", "ry"))
        return Box(name, shape["cx"] - rx, shape["cy"] - ry, shape["cx"] + rx, shape["cy"] + ry)
    if kind != "polygon":
        raise ValueError(f"a {kind} has no area")
    return box_around(name, zip(shape["all_points_x"], shape["all_points_y"]))


VIA = Format(name="via", title="VIA JSON", suffix=".json", is_per_image=False, read=read_via, mark='"file_attributes"')
