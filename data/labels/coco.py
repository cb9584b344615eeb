"""Reads COCO detection JSON: one file for all images, boxes as x, y, w, h in pixels, classes matched by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data.labels.categories import COCO_JSON, Category, category_names, checked_categories, same_name_error
from data.labels.findings import BAD_ROW, ORPHAN, UNKNOWN_CLASS, Finding
from data.labels.json_files import load_json, number, numbers, shown
from data.labels.label_format import LabelFormat, LabelRow, Listing, RawLabels, shape_of
from data.labels.match import ImageEntry, LabelsPerSplit, SplitFile
from utils.errors import UserError
from utils.files.paths import path_of

_MAX = 1e300  # larger numbers count as infinite
_MAX_SIDE = 2**32  # pixels; no format of images stores a larger one
_NUMBERS_OF_BOX = 8  # length of a polygon with four corners
_COMPARED = 6  # numbers at each end of a polygon that distinguish it from others


def _read(listing: Listing, names: tuple[str, ...] | None) -> LabelsPerSplit:
    path = Path(path_of(listing.labels[0], listing.root))
    return LabelsPerSplit(listing, read_coco(path, listing.labels[0], names))


def read_coco(path: Path, name: str, names: tuple[str, ...] | None) -> SplitFile:
    """Reads a COCO JSON. If ``names`` is None, every object is of class 0. Raises UserError for any other file."""
    data = load_json(path, COCO_JSON)
    if not isinstance(data, dict):
        raise UserError(f"{path}: not {COCO_JSON}")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key), list):
            raise UserError(f"{path}: has no list '{key}'; is it a COCO JSON for detection?")
    entries = _entries(data["images"], path)
    entry_of = {_id_key(entry.image_id): entry for entry in entries}
    name_of = checked_categories(data["categories"], path)
    category_of = {_id_key(category_id): category_id for category_id in name_of}
    class_of_name = {class_name: number for number, class_name in enumerate(names or ())}
    unmatched_annotations: list[Finding] = []
    annotation_ids: list[Any] = []
    used_categories: set[int] = set()
    for position, annotation in enumerate(data["annotations"]):
        is_dict = isinstance(annotation, dict)
        annotation_ids.append(annotation.get("id", position) if is_dict else position)
        entry = entry_of.get(_id_key(annotation.get("image_id"))) if is_dict else None
        if entry is None:
            reason = f"image_id {shown(annotation.get('image_id'))} is not in 'images'" if is_dict else "not an object"
            where = f"{name}: annotation {annotation_ids[-1]}"
            unmatched_annotations.append(Finding(ORPHAN, reason, where, lost_objects=1))
            continue
        category_id = category_of.get(_id_key(annotation.get("category_id")))
        class_id: int | None = 0
        if category_id is not None:
            used_categories.add(category_id)
        if names is not None:
            class_id = None if category_id is None else class_of_name.get(name_of[category_id])
        class_name = f"category_id {shown(annotation.get('category_id'))}"
        if category_id is not None:
            class_name = f"'{name_of[category_id]}'"
        entry.labels.add(_parse_annotation(annotation, position, class_id, class_name))
    _check_used_names(used_categories, name_of, names or (), path)
    categories = tuple(Category(i, name_of[i], i in used_categories) for i in sorted(name_of))
    return SplitFile(name, entries, categories, annotation_ids, unmatched_annotations)


def _entries(images: list[Any], path: Path) -> list[ImageEntry]:
    """Returns the image entries, without labels. Raises UserError that names an invalid one."""
    position_of: dict[str, int] = {}
    entries = []
    for position, image in enumerate(images):
        location = f"{path}: images[{position}]"
        if not isinstance(image, dict) or not isinstance(image.get("file_name"), str) or image.get("id") is None:
            raise UserError(f"{location}: expected an image with id and file_name, got {shown(image)}")
        image_id = image["id"]
        if type(image_id) is float and image_id.is_integer():
            image_id = int(image_id)
        if type(image_id) not in (int, str):
            raise UserError(f"{location}: id {shown(image_id)} is neither an integer nor a string")
        first = position_of.setdefault(_id_key(image_id), position)
        if first != position:
            raise UserError(f"{location}: has the id {shown(image_id)} of images[{first}]; ids must be unique")
        entries.append(ImageEntry(image["file_name"].replace("\\", "/"), image_id, RawLabels([], [], _size(image))))
    return entries


def _size(image: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the height and width that the labels state; None if they state none, or what no image can have."""
    sides: list[int] = []
    for name in ("height", "width"):
        side = number(image.get(name))
        if side is None or not 0 < side < _MAX_SIDE or side != int(side):
            return None
        sides.append(int(side))
    return sides[0], sides[1]


def _parse_annotation(annotation: dict, position: int, class_id: int | None, class_name: str) -> LabelRow | Finding:
    """Returns the row of an annotation at ``position``, or its problem. ``class_id``: None if the class is unknown."""
    box = annotation.get("bbox")
    values = numbers(box) if isinstance(box, list) and len(box) == 4 else []
    if not values:
        return Finding(BAD_ROW, f"expected a bbox of four numbers, got {shown(box)[:60]}", row_number=position)
    if not all(-_MAX < v < _MAX for v in values):  # not isfinite, because JSON integers may be too large for a float
        return Finding(BAD_ROW, f"a number is not finite: bbox {str(box)[:100]}", row_number=position)
    x, y, w, h = map(float, values)  # the product of two JSON integers may be too large for a float
    corners = (x, y, x + w, y + h)
    if class_id is None:
        return Finding(UNKNOWN_CLASS, class_name, xyxy_px=corners, row_number=position)
    crowd = annotation.get("iscrowd")
    if crowd not in (0, 1, "0", "1", None):
        return Finding(BAD_ROW, f"expected iscrowd 0 or 1, got {shown(crowd)[:60]}", row_number=position)
    area = number(annotation.get("area"))
    if area is None or not 0 <= area < _MAX:
        area = w * h
    return class_id, *corners, area, int(crowd or 0), position, _shape(annotation.get("segmentation"))


def _shape(segmentation: Any) -> int:
    """Returns the `shape_of` polygons, computed from both ends of the first one; 0 for other values."""
    if not isinstance(segmentation, list) or not segmentation or not isinstance(segmentation[0], list):
        return 0
    first = segmentation[0]
    ends = numbers([*first[:_COMPARED], *first[-_COMPARED:]])
    if not ends:
        return 0
    if len(first) == _NUMBERS_OF_BOX and len(set(first[::2])) == len(set(first[1::2])) == 2:
        return 0  # the box itself
    return shape_of((len(segmentation), len(first), *ends))


def _check_used_names(used: Iterable[int], name_of: dict[int, str], names: Sequence[str], path: Path) -> None:
    """Raises UserError if two categories with the name of one class have annotations."""
    used_id_of: dict[str, int] = {}
    for category_id in sorted(used):
        name = name_of[category_id]
        if name in used_id_of and name in names:
            raise same_name_error(path, name, used_id_of[name], category_id)
        used_id_of[name] = category_id


def _id_key(value: Any) -> str:
    """Returns an id as text, so that 7, 7.0 and "7" are the same id; "" for what is none."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return str(value) if type(value) in (int, str) else ""


COCO = LabelFormat(
    name="coco", suffix=".json", is_per_image=False, in_annotations=True, read=_read, class_names=category_names
)
