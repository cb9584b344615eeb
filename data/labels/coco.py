"""Reads COCO detection JSON: one file per split, boxes as x, y, w, h in pixels, classes matched by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from data.labels.categories import Category
from data.labels.coco_categories import COCO_JSON, Categories, category_names, checked_categories
from data.labels.coco_ids import Ids, whole_number
from data.labels.findings import BAD_ROW, NOT_FINITE
from data.labels.image_entries import ImageEntry
from data.labels.json_files import load_json, shown
from data.labels.label_format import TOP_LEFT, LabelFiles, LabelFormat, LabelRequest, LabelSource
from data.labels.per_split import LabelsPerSplit, SplitFile
from data.labels.rows import LabelRow, RawLabels, RowProblem, shape_of
from utils.errors import UserError
from utils.files.paths import path_of

_MAX = 1e300  # larger numbers count as infinite
_MAX_SIDE = 2**32  # pixels; no format of images stores a larger one
_IMAGES = re.compile(rb'"(annotations|images)"\s*:\s*\[\s*\{')
_BEFORE_IMAGES = re.compile(rb'"(categories|licenses)"\s*:\s*\[\s*\{')
_NUMBERS_OF_BOX = 8  # length of a polygon with four corners
_COMPARED = 6  # numbers at each end of a polygon that distinguish it from others


def read_coco(path: Path, names: tuple[str, ...] | None) -> SplitFile:
    """Reads a COCO JSON. If ``names`` is None, every object is of class 0. Raises UserError for any other file."""
    data = load_json(path, COCO_JSON)
    if not isinstance(data, dict):
        raise UserError(f"{path}: not {COCO_JSON}")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key), list):
            raise UserError(f"{path}: has no list '{key}'; is it a COCO JSON for detection?")
    annotations = data["annotations"]
    entry_of = _image_entries(data["images"], path)
    image_ids = Ids(entry_of, "the images'")
    categories = Categories(checked_categories(data["categories"], path), names)
    strays = []
    used_categories: set[int] = set()
    for position, annotation in enumerate(annotations):
        if not isinstance(annotation, dict):
            strays.append((position, f"expected keys and values, got {shown(annotation)}"))
            continue
        image_id = image_ids.find(annotation.get("image_id"))
        if image_id is None:
            strays.append((position, image_ids.mismatch(annotation, "image_id")))
            continue
        category_id = categories.id_of(annotation)
        if category_id is not None:
            used_categories.add(category_id)
        entry_of[image_id].labels.add(_parse_annotation(annotation, position, category_id, categories))
    categories.check_used_names(used_categories, path)
    return SplitFile(
        images=list(entry_of.values()),
        categories=tuple(Category(i, name, i in used_categories) for i, name in sorted(categories.name_of.items())),
        annotation_ids=[a.get("id", i) if isinstance(a, dict) else i for i, a in enumerate(annotations)],
        strays=strays,
    )


def _image_entries(images: list[Any], path: Path) -> dict[int | str, ImageEntry]:
    """Returns the image entries by id, without labels. Raises UserError that names an invalid entry."""
    entry_of: dict[int | str, ImageEntry] = {}
    position_of: dict[int | str, int] = {}
    for position, image in enumerate(images):
        location = f"{path}: images[{position}]"
        if not isinstance(image, dict) or not isinstance(image.get("file_name"), str) or image.get("id") is None:
            raise UserError(f"{location}: expected an image with id and file_name, got {shown(image)}")
        image_id = image["id"]
        if type(image_id) is float and image_id.is_integer():
            image_id = int(image_id)
        if type(image_id) not in (int, str):
            raise UserError(f"{location}: id {shown(image_id)} is neither an integer nor a string")
        if image_id in entry_of:
            raise UserError(
                f"{location}: has the id {shown(image_id)} of images[{position_of[image_id]}]; ids must be unique"
            )
        position_of[image_id] = position
        file_name = image["file_name"].replace("\\", "/")
        entry_of[image_id] = ImageEntry(file_name, image_id, RawLabels([], [], _size(image)))
    return entry_of


def _size(image: dict) -> tuple[int, int] | None:
    """Returns the height and width that the labels state; None if they state none, or what no image can have."""
    height, width = (whole_number(image.get(side)) for side in ("height", "width"))
    if height is None or width is None or not (0 < height < _MAX_SIDE and 0 < width < _MAX_SIDE):
        return None
    return height, width


def _parse_annotation(
    annotation: dict, position: int, category_id: int | None, categories: Categories
) -> LabelRow | RowProblem:
    """Returns the row of an annotation, or its problem.

    Args:
        annotation: an entry of the JSON's ``annotations``, at ``position``.
        category_id: id of the annotation's category in ``categories``; None if it is unknown or missing.
    """
    box = annotation.get("bbox")
    if not (isinstance(box, list) and len(box) == 4 and all(type(v) in (int, float) for v in box)):
        expected = "expected a bbox of four numbers"
        return RowProblem(position, BAD_ROW, f"{expected}, got {shown(box)[:60]}", cause=expected)
    if not all(-_MAX < v < _MAX for v in box):  # not isfinite, because JSON integers may be too large for a float
        return RowProblem(position, NOT_FINITE, f"bbox {str(box)[:100]}")
    x, y, w, h = map(float, box)  # the product of two JSON integers may be too large for a float
    corners = (x, y, x + w, y + h)
    class_id = categories.class_of(category_id)
    if class_id is None:
        return categories.unknown_class(annotation, position, corners)
    crowd = annotation.get("iscrowd")
    if crowd not in (0, 1, None):
        expected = "expected iscrowd 0 or 1"
        return RowProblem(position, BAD_ROW, f"{expected}, got {shown(crowd)[:60]}", cause=expected)
    area = annotation.get("area")
    if isinstance(area, bool) or not isinstance(area, int | float) or not 0 <= area < _MAX:
        area = w * h
    return class_id, *corners, area, 1 if crowd else 0, position, _shape(annotation.get("segmentation"))


def _shape(segmentation: Any) -> int:
    """Returns the `shape_of` polygons, computed from both ends of the first one; 0 for other values."""
    if not isinstance(segmentation, list) or not segmentation or not isinstance(segmentation[0], list):
        return 0
    first = segmentation[0]
    ends = (*first[:_COMPARED], *first[-_COMPARED:])
    if not all(type(value) in (int, float) for value in ends):
        return 0
    if len(first) == _NUMBERS_OF_BOX and len(set(first[::2])) == len(set(first[1::2])) == 2:
        return 0  # the box itself
    return shape_of((len(segmentation), len(first), *ends))


def _read(request: LabelRequest) -> LabelSource:
    path = Path(path_of(request.files[0].name, request.root))
    return LabelsPerSplit(request, read_coco(path, request.names))


def is_coco(head: bytes) -> bool:
    """Returns whether a file that begins with ``head`` seems to be a COCO JSON. Long lists of licenses and categories
    may come before the images, as in Roboflow's exports. A complete file without images is not one, for example the
    notes.json that Label Studio writes next to YOLO txt."""
    if _IMAGES.search(head):
        return True
    return _BEFORE_IMAGES.search(head) is not None and not _is_whole_json(head)


def _is_whole_json(head: bytes) -> bool:
    """Returns whether ``head`` is a complete JSON document."""
    try:
        json.loads(head)
    except (ValueError, RecursionError):
        return False
    return True


_FILES = LabelFiles(suffix=".json", is_labels=is_coco, advice="if it is COCO's, add 'annotations: {entry}' to the YAML")
COCO = LabelFormat("coco", TOP_LEFT, _read, _FILES, class_names=category_names)
