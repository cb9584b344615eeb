"""Labels as a strict reader reads them, to judge what a scan of changed label files takes."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any, NamedTuple
from xml.etree import ElementTree

from data.index.index import DatasetIndex

NAMES = ("light", "dark")
SIZES = {"a.png": (60, 80), "b.png": (50, 40), "c.jpg": (64, 64), "d.png": (90, 120)}  # h, w
OBJECTS = {  # class, x1, y1, x2, y2 in pixels
    "a.png": [(0, 8, 6, 40, 30), (1, 0, 0, 80, 60)],
    "b.png": [(1, 10, 10, 20, 35)],
    "c.jpg": [(1, 16, 16, 32, 48), (0, 1, 2, 11, 12), (0, 30, 30, 60, 60)],
    "d.png": [(0, 60, 20, 110, 80)],
}


class Row(NamedTuple):
    """One object as a strict reader reads it."""

    class_id: int
    x1: float  # pixels, as the file says
    y1: float
    x2: float
    y2: float
    crowd: bool = False
    points: tuple[float, ...] = ()  # corners of a polygon: another one with the same box is another object


class Reading(NamedTuple):
    """The labels of an image as a strict reader reads them."""

    rows: list[Row]
    must_tell: bool  # something in it is invalid
    in_pixels: bool = False  # a box within the first pixel may be one of fractions


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def strict_number(text: str) -> float | None:
    """A finite decimal number in ASCII; None for anything else."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


def strict_yolo(data: bytes, height: int, width: int) -> Reading:
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return Reading([], True)
    rows = []
    must_tell = False
    for line in text.splitlines():
        fields = line.split()
        values = [strict_number(f) for f in fields]
        if not fields:
            continue
        count = len(values)
        if None in values or (count != 5 and (count < 7 or count % 2 == 0)) or values[0] not in range(len(NAMES)):
            must_tell = True
            continue
        if count == 5:
            _, cx, cy, w, h = values
            corners = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
        else:
            corners = (min(values[1::2]), min(values[2::2]), max(values[1::2]), max(values[2::2]))
        x1, y1, x2, y2 = corners
        points = () if count == 5 else tuple(values[1:])
        rows.append(Row(int(values[0]), x1 * width, y1 * height, x2 * width, y2 * height, points=points))
    return Reading(rows, must_tell)


def strict_voc(data: bytes) -> Reading:
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, LookupError):
        return Reading([], True)
    if root.tag != "annotation":
        return Reading([], True)
    rows = []
    must_tell = False
    for element in root.findall("object"):
        boxes = element.findall("bndbox")
        names = element.findall("name")
        leaves = [boxes[0].findall(tag) for tag in ("xmin", "ymin", "xmax", "ymax")] if len(boxes) == 1 else []
        whole = len(names) == 1 and leaves and all(len(found) == 1 and not len(found[0]) for found in leaves)
        numbers = [strict_number((found[0].text or "").strip()) for found in leaves] if whole else [None]
        name = (names[0].text or "").strip() if whole and not len(names[0]) else ""
        if None in numbers or name not in NAMES:
            must_tell = True
        else:
            rows.append(Row(NAMES.index(name), *numbers))
    return Reading(rows, must_tell, in_pixels=True)


class OddJsonError(Exception):
    """JSON that a strict reader refuses."""


def strict_coco(data: bytes) -> dict[str, Reading]:
    """Readings by file name. Raises OddJsonError if the whole file must be refused."""
    tree = _coco_tree(data)
    try:
        images = _coco_images(tree)
        categories = _coco_categories(tree)
        annotations = list(tree["annotations"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OddJsonError(str(error)[:80]) from None
    rows: dict[str, list[Row]] = {name: [] for name in images.values()}
    invalid: set[str] = set()  # names of images with an annotation that is left out
    has_strays = False
    for annotation in annotations:
        image_id = _number_of(annotation.get("image_id")) if isinstance(annotation, dict) else None
        name = images.get((type(image_id), image_id)) if type(image_id) in (int, str) else None
        if name is None:
            has_strays = True
            continue
        row = _coco_row(annotation, categories)
        if row is None:
            invalid.add(name)
        else:
            rows[name].append(row)
    return {name: Reading(rows[name], has_strays or name in invalid, in_pixels=True) for name in rows}


def _coco_tree(data: bytes) -> Any:
    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise OddJsonError("a key twice")
        return dict(pairs)

    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise OddJsonError(str(error)[:80]) from None


def _coco_images(tree: Any) -> dict[tuple[type, Any], str]:
    """Returns the file name of each image, by the type and value of its id: 1 and "1" are two."""
    ids = [_whole_float_as_integer(image["id"]) for image in tree["images"]]
    names = {(type(id_), id_): image["file_name"] for id_, image in zip(ids, tree["images"])}
    if len(names) < len(tree["images"]):
        raise OddJsonError("an id twice")
    if not all(isinstance(name, str) for name in names.values()):
        raise OddJsonError("a file name that is not text")
    return names


def _coco_categories(tree: Any) -> dict[int, Any]:
    ids = [_whole_float_as_integer(category["id"]) for category in tree["categories"]]
    if len(set(ids)) < len(ids) or any(type(id_) is not int for id_ in ids):
        raise OddJsonError("an id twice, or none")
    names = {id_: category["name"] for id_, category in zip(ids, tree["categories"])}
    if not all(type(name) in (str, int, float) for name in names.values()):
        raise OddJsonError("a category's name that is none")
    return names


def _coco_row(annotation: dict, categories: dict[int, Any]) -> Row | None:
    """Returns the object of an annotation; None if it must be left out."""
    box = annotation.get("bbox")
    category = _number_of(annotation.get("category_id"))
    crowd = annotation.get("iscrowd", 0)
    if not isinstance(box, list) or len(box) != 4 or not all(type(value) in (int, float) for value in box):
        return None
    if not all(abs(value) < 1e300 for value in box):  # also false for nan
        return None
    if type(category) is not int or categories.get(category) not in NAMES or crowd not in (0, 1, None):
        return None
    x, y, width, height = box
    return Row(NAMES.index(categories[category]), x, y, x + width, y + height, bool(crowd))


def _whole_float_as_integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _number_of(value: Any) -> Any:
    """Returns an id as a number if it is a whole float or the text of one: ids of images are numbers here."""
    value = _whole_float_as_integer(value)
    if type(value) is str and re.fullmatch(r"-?\d{1,18}(\.0*)?", value, re.ASCII):
        return int(value.split(".")[0])
    return value


Box = tuple[int, float, float, float, float, bool]  # class, x1, y1, x2, y2 in pixels, crowd


def judge_boxes(index: DatasetIndex, name: str, reading: Reading, *label_files: str) -> str:
    """Checks that the index contains the boxes of an image that a strict reader reads, or reports the label file."""
    is_reported = any(file in line for line in map(str, index.report.findings) for file in (*label_files, name))
    numbers = [i for i, path in enumerate(index.paths) if os.path.basename(path) == name]
    if not numbers:
        assert is_reported, f"{name} is left out in silence"
        return "left out by name"
    boxes = _indexed_boxes(index, numbers[0])
    possible, required, must_tell = _expected_boxes(reading, SIZES[name])
    if len(boxes) > 50 and len(boxes) == len(required):  # in the order of the file
        assert all(_alike(a, b) for a, b in zip(boxes, required))
    else:
        for box in boxes:
            assert any(_alike(box, other) for other in possible), f"{name}: {box} is in no row"
        for box in required:
            assert any(_alike(box, other) for other in boxes), f"{name}: {box} is missing"
    assert is_reported or not must_tell, f"{name}: {len(boxes)} boxes, and not a word of what is wrong"
    is_complete = len(boxes) == len(required) or len(possible) > len(required)
    assert is_reported or is_complete, f"{name}: {len(boxes)} boxes"
    return "named in the report" if is_reported else "the boxes that it says"


def _indexed_boxes(index: DatasetIndex, number: int) -> list[Box]:
    rows = slice(index.offsets[number], index.offsets[number + 1])
    return [
        (int(class_id), float(x), float(y), float(x + w), float(y + h), bool(crowd))
        for class_id, (x, y, w, h), crowd in zip(index.classes[rows], index.boxes_xywh_px[rows], index.crowd[rows])
    ]


def _expected_boxes(reading: Reading, image_hw: tuple[int, int]) -> tuple[list[Box], list[Box], bool]:
    """Returns the boxes that the index may contain, those that it must contain, and whether something must be
    reported. Boxes at the limits of what is clipped or dropped in silence may be treated in either way."""
    height, width = image_hw
    sides = (width, height, width, height)
    possible: list[Box] = []
    required: list[Box] = []
    must_tell = reading.must_tell
    seen: set[Row] = set()
    for row in reading.rows:
        x1, x2 = sorted((row.x1, row.x2))
        y1, y2 = sorted((row.y1, row.y2))
        must_tell |= (x1, y1, x2, y2) != row[1:5]
        row = row._replace(x1=x1, y1=y1, x2=x2, y2=y2)
        clipped = [min(max(value, 0.0), side) for value, side in zip(row[1:5], sides)]
        overhang = max(abs(a - b) for a, b in zip(clipped, row[1:5]))
        shorter_side = min(clipped[2] - clipped[0], clipped[3] - clipped[1], x2 - x1, y2 - y1)
        box = (row.class_id, clipped[0], clipped[1], clipped[2], clipped[3], row.crowd)
        may_be_fractions = reading.in_pixels and max(x2, y2) <= 1
        if row in seen or shorter_side < 0.0009 or overhang > 0.02 + 2e-5 * max(sides):
            must_tell = True
        elif shorter_side > 0.0011 and overhang < 0.009 and not may_be_fractions:
            required.append(box)
        possible.append(box)
        seen.add(row)
    return possible, required, must_tell


def _alike(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and a[-1] == b[-1] and all(abs(x - y) < 0.01 for x, y in zip(a[1:-1], b[1:-1]))
