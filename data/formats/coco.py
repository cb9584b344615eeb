"""Reads COCO detection JSON: one file for all images, boxes as x, y, w, h in pixels, classes matched by name. The row
number is the position of an annotation."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from data.formats.label_format import (
    Box,
    Classes,
    Entry,
    Format,
    LabelFileError,
    number,
    parse_json,
    rows_of,
    shown,
    stated_size,
)
from utils.files.encoding import EncodingError, decode_utf8

_MAX = 1e300  # larger numbers count as infinite


def read_coco(data: bytes, classes: Classes) -> list[Entry]:
    """Reads a file. Annotations of no image become entries that are called like their ``image_id``. Raises
    LabelFileError for any other file."""
    content = parse_json(data)
    if not isinstance(content, dict):
        raise LabelFileError("not a COCO JSON: expected images, annotations and categories")
    for key in ("images", "annotations", "categories"):
        if not isinstance(content.get(key), list):
            raise LabelFileError(f"has no list '{key}'; is it a COCO JSON for detection?")
    name_of = _names_by_id(content["categories"])
    images = _images_by_id(content["images"])
    used_ids: set[str] = set()
    annotations_of: dict[str, list[tuple[int, Any]]] = {}
    for position, annotation in enumerate(content["annotations"]):
        is_dict = isinstance(annotation, dict)
        key = _id_key(annotation.get("image_id")) if is_dict else ""
        annotations_of.setdefault(key, []).append((position, annotation))
        if is_dict and key in images:
            used_ids.add(_id_key(annotation.get("category_id")))
    _set_category_ids(classes, name_of, used_ids)
    parse = partial(_box, name_of=name_of)
    entries = []
    for key, image in images.items():
        rows = rows_of(annotations_of.pop(key, ()), parse, classes)
        name = image["file_name"].replace("\\", "/")
        size_hw = stated_size(image.get("height"), image.get("width"))
        entries.append(Entry(rows, name, size_hw, _integer(image["id"])))
    for key, of_no_image in annotations_of.items():
        entries.append(Entry(rows_of(of_no_image, parse, classes), f"image_id {key or 'missing'}"))
    return entries


def _images_by_id(images: list[Any]) -> dict[str, dict[str, Any]]:
    """Returns the images by the `_id_key` of their ids. Raises LabelFileError that names an invalid one."""
    by_id: dict[str, dict[str, Any]] = {}
    for position, image in enumerate(images):
        key = _id_key(image.get("id")) if isinstance(image, dict) else ""
        if not key or not isinstance(image.get("file_name"), str):
            raise LabelFileError(f"images[{position}]: expected an image with id and file_name, got {shown(image)}")
        if key in by_id:
            raise LabelFileError(f"images[{position}]: has the id {key} of another image; ids must be unique")
        by_id[key] = image
    return by_id


def _names_by_id(categories: list[Any]) -> dict[str, str]:
    """Returns the category names, without outer spaces, by `_id_key`. Raises LabelFileError for an invalid entry."""
    name_of: dict[str, str] = {}
    for position, category in enumerate(categories):
        key = _id_key(number(category.get("id"))) if isinstance(category, dict) else ""
        name = str(category.get("name")).strip() if key else ""  # like the names in the YAML
        if not key or not name or category.get("name") is None or key in name_of:
            expected = "a category with a name and an integer id of its own"
            raise LabelFileError(f"categories[{position}]: expected {expected}, got {shown(category)}")
        name_of[key] = name
    return name_of


def _set_category_ids(classes: Classes, name_of: dict[str, str], used_ids: set[str]) -> None:
    """Sets ``classes.id_of_category``. Of several categories with a name, one with annotations counts: Roboflow's root
    may be named like a class. Raises LabelFileError if two of a class have annotations, which pycocotools would score
    as two classes."""
    for key in sorted(name_of, key=lambda key: (key not in used_ids, int(key))):
        name = name_of[key]
        first = classes.id_of_category.setdefault(name, int(key))
        if first != int(key) and key in used_ids and name in (classes.names or ()):
            raise LabelFileError(
                f"categories: '{name}' is the name of the ids {first} and {key}; rename one, or give the annotations "
                "of both the same category_id"
            )


def category_names(data: bytes) -> tuple[str, ...]:
    """Returns the names of the categories, ordered by id. Only these are parsed, because the files are large.

    A category that all others name as their supercategory, and that no annotation has, is not a class: exports of
    Roboflow begin with such a root. Raises LabelFileError.
    """
    try:
        text = decode_utf8(data)
    except EncodingError as error:
        raise LabelFileError(str(error)) from None
    categories: list[Any] = []
    for match in re.finditer(r'(?<!\\)"categories"\s*:\s*(?=\[)', text):  # "info" may have one, too
        try:
            categories, _ = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        if all(isinstance(category, dict) and {"id", "name"} <= category.keys() for category in categories):
            break
    else:
        raise LabelFileError("has no categories to take the names from; is it a COCO JSON?")
    name_of = _names_by_id(categories)
    for root in categories:
        others = [category for category in categories if category is not root]
        is_above_all = bool(others) and all(category.get("supercategory") == root["name"] for category in others)
        key = _id_key(number(root["id"]))
        if is_above_all and not re.search(rf'"category_id"\s*:\s*"?{key}\b', text):
            del name_of[key]
            break
    return tuple(dict.fromkeys(name_of[key] for key in sorted(name_of, key=int)))


def _box(annotation: Any, name_of: dict[str, str]) -> Box:
    """Returns the box of an annotation. Raises ValueError."""
    bbox = annotation.get("bbox")
    found = map(number, bbox) if isinstance(bbox, list) and len(bbox) == 4 else ()
    values = [value for value in found if value is not None]
    if len(values) != 4:
        raise ValueError(f"expected a bbox of four numbers, got {shown(bbox)[:60]}")
    x, y, w, h = map(float, values)
    crowd = annotation.get("iscrowd")
    if crowd not in (0, 1, "0", "1", None):
        raise ValueError(f"expected iscrowd 0 or 1, got {shown(crowd)[:60]}")
    area = number(annotation.get("area"))
    if area is None or not 0 <= area < _MAX:
        area = w * h
    category_id = annotation.get("category_id")
    name = name_of.get(_id_key(category_id), f"category_id {shown(category_id)}")
    return Box(name, x, y, x + w, y + h, int(crowd or 0), area)


def _integer(value: Any) -> Any:
    """Converts 7.0 to 7."""
    return int(value) if type(value) is float and value.is_integer() else value


def _id_key(value: Any) -> str:
    """Returns an id as text, so that 7, 7.0 and "7" are the same id; "" for what is none."""
    value = _integer(value)
    return str(value) if type(value) in (int, str) else ""


COCO = Format(
    name="coco",
    title="COCO JSON",
    suffix=".json",
    is_per_image=False,
    read=read_coco,
    signature='"(images|annotations|categories)"',
    class_names=category_names,
)
