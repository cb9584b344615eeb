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

    def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise OddJsonError("a key twice")
        return dict(pairs)

    try:
        tree = json.loads(data.decode("utf-8-sig"), object_pairs_hook=once_each)
        image_ids = [_whole_float_as_integer(i["id"]) for i in tree["images"]]
        images = {(type(id_), id_): i["file_name"] for id_, i in zip(image_ids, tree["images"])}
        ids = [_whole_float_as_integer(c["id"]) for c in tree["categories"]]
        if len(images) < len(tree["images"]) or len(set(ids)) < len(ids) or any(type(i) is not int for i in ids):
            raise OddJsonError("an id twice")
        if not all(isinstance(name, str) for name in images.values()):
            raise OddJsonError("a name that is none")
        categories = {id_: c["name"] for id_, c in zip(ids, tree["categories"])}
        if not all(type(name) in (str, int, float) for name in categories.values()):
            raise OddJsonError("a category's name that is none")
        annotations = list(tree["annotations"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OddJsonError(str(error)[:80]) from None
    found: dict[str, list[Row]] = {name: [] for name in images.values()}
    odd: set[str] = set()
    astray = False
    for a in annotations:
        image_id = _number_of(a.get("image_id")) if isinstance(a, dict) else None
        name = images.get((type(image_id), image_id)) if type(image_id) in (int, str) else None
        if name is None:
            astray = True
            continue
        box = a.get("bbox")
        category = _number_of(a.get("category_id"))
        crowd = a.get("iscrowd", 0)
        good = isinstance(box, list) and len(box) == 4 and all(type(v) in (int, float) for v in box)
        good = good and all(abs(v) < 1e300 for v in box) and type(category) is int  # also where it is nan
        if not good or categories.get(category) not in NAMES or crowd not in (0, 1, None):
            odd.add(name)
            continue
        x, y, w, h = box
        found[name].append(Row(NAMES.index(categories[category]), x, y, x + w, y + h, bool(crowd)))
    return {name: Reading(rows, astray or name in odd, in_pixels=True) for name, rows in found.items()}


def _whole_float_as_integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _number_of(value: Any) -> Any:
    """A whole float, or the text of a whole number, as that number: ids of images are numbers here."""
    value = _whole_float_as_integer(value)
    if type(value) is str and re.fullmatch(r"-?\d{1,18}(\.0*)?", value, re.ASCII):
        return int(value.split(".")[0])
    return value


def judge_boxes(index: DatasetIndex, name: str, reading: Reading, *label_files: str) -> str:
    """Checks that the index contains the boxes of an image that a strict reader reads, or reports the label file."""
    told = any(file in line for line in index.report.lines for file in (*label_files, name))
    found = [i for i, path in enumerate(index.paths) if os.path.basename(path) == name]
    if not found:
        assert told, f"{name} is left out in silence"
        return "left out by name"
    height, width = SIZES[name]
    first = index.offsets[found[0]]
    last = index.offsets[found[0] + 1]
    boxes = [
        (int(c), *map(float, (x, y, x + w, y + h)), bool(crowd))
        for c, (x, y, w, h), crowd in zip(
            index.classes[first:last], index.boxes_xywh_px[first:last], index.crowd[first:last]
        )
    ]
    possible = []
    must_tell = reading.must_tell
    wanted = []
    seen: set[Row] = set()
    for row in reading.rows:
        sides = (width, height, width, height)
        in_order = row._replace(
            x1=min(row.x1, row.x2), y1=min(row.y1, row.y2), x2=max(row.x1, row.x2), y2=max(row.y1, row.y2)
        )
        must_tell |= in_order != row
        row = in_order
        clipped = [min(max(v, 0.0), side) for v, side in zip(row[1:5], sides)]
        over = max(abs(a - b) for a, b in zip(clipped, row[1:5]))
        side = min(clipped[2] - clipped[0], clipped[3] - clipped[1], row.x2 - row.x1, row.y2 - row.y1)
        box = (row.class_id, *clipped, row.crowd)
        may_be_fractions = reading.in_pixels and max(row.x2, row.y2) <= 1
        if row in seen or side < 0.0009 or over > 0.02 + 2e-5 * max(sides):
            must_tell = True
        elif side > 0.0011 and over < 0.009 and not may_be_fractions:
            wanted.append(box)
        possible.append(box)
        seen.add(row)
    if len(boxes) > 50 and len(boxes) == len(wanted):  # in the order of the file
        assert all(_alike(a, b) for a, b in zip(boxes, wanted))
    else:
        for box in boxes:
            assert any(_alike(box, other) for other in possible), f"{name}: {box} is in no row"
        for box in wanted:
            assert any(_alike(box, other) for other in boxes), f"{name}: {box} is missing"
    assert told or not must_tell, f"{name}: {len(boxes)} boxes, and not a word of what is wrong"
    assert told or len(boxes) == len(wanted) or len(possible) > len(wanted), f"{name}: {len(boxes)} boxes"
    return "named in the report" if told else "the boxes that it says"


def _alike(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and a[-1] == b[-1] and all(abs(x - y) < 0.01 for x, y in zip(a[1:-1], b[1:-1]))
