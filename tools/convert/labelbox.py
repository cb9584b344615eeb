"""Reads Labelbox's export: one row per image, in NDJSON or in a list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data.labels.json_files import load_json
from tools.convert.annotations import AnnotatedBox, Annotations, Entry, around_polygon
from tools.convert.values import MAX_FILE_BYTES, image_name, name_of, numbers, objects_in, parse_object, parse_size
from utils.errors import UserError, one_line
from utils.files.safe_io import read_text
from utils.schema import check

_WITHOUT_AREA = {"point": "point", "line": "polyline"}  # key of an object: kind of its shape


def read_labelbox(file: Path, annotations: Annotations) -> None:
    """Adds the boxes, and the boxes around polygons. The image of a row without a label, or with a skipped one, is
    unlabeled."""
    for location, row in _rows(file):
        labels = [label for label in _labels(row, location) if not _is_skipped(label)]
        if not labels:
            continue
        if len(labels) > 1:
            raise UserError(f"{location}: has {len(labels)} labels; export one project, with one label per image")
        labels_of_image = check(labels[0].get("annotations"), dict, f"{location}: annotations")
        boxes = [_box(shape, location, annotations) for shape in objects_in(labels_of_image, "objects", location)]
        data = check(row.get("data_row"), dict, f"{location}: data_row")
        media = check(row.get("media_attributes"), dict, f"{location}: media_attributes")
        size = parse_size(media.get("width"), media.get("height"), location)
        name = _image_name(data, location)
        annotations.add(Entry(image=name, boxes=boxes, location=location, file=file, size=size, is_complete=True))


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the location, for messages, and the content of each row of an export."""
    text = read_text(file, max_bytes=MAX_FILE_BYTES)
    if text.lstrip().startswith("["):
        for position, row in enumerate(check(load_json(file, "Labelbox's JSON"), list, str(file))):
            location = f"{file}: row {position}"
            yield location, check(row, dict, location)
        return
    for line, row in enumerate(text.split("\n"), 1):
        if row.strip():
            location = f"{file}:{line}"
            yield location, parse_object(row, location)


def _labels(row: dict[str, Any], location: str) -> list[dict[str, Any]]:
    """Returns the labels of an image in all projects."""
    labels = []
    for project in check(row.get("projects"), dict, f"{location}: projects").values():
        labels += objects_in(check(project, dict, location), "labels", location)
    return labels


def _is_skipped(label: dict[str, Any]) -> bool:
    """Returns whether the annotator has skipped the image."""
    details = label.get("performance_details")
    return isinstance(details, dict) and details.get("skipped") is True


def _image_name(data: dict[str, Any], location: str) -> str:
    """Returns the name of a row's image, or the path in the URL that it was uploaded from. Raises UserError without
    either."""
    name = name_of(data.get("external_id") or data.get("global_key"), f"{location}: external_id")
    if name:
        return name
    url = str(data.get("row_data") or "")
    try:
        path = urlsplit(url).path
    except ValueError:
        raise UserError(f"{location}: row_data: malformed URL {one_line(url)[:60]!r}") from None
    return image_name(path, location)


def _box(shape: dict[str, Any], location: str, annotations: Annotations) -> AnnotatedBox | None:
    """Returns the box around an object; None for one without area."""
    name = name_of(shape.get("name") or shape.get("value"), f"{location}: name")
    if "bounding_box" in shape:
        sides = check(shape["bounding_box"], dict, f"{location}: bounding_box")
        return AnnotatedBox.of_xywh(name, *numbers(sides, ("left", "top", "width", "height"), location))
    if "polygon" in shape:
        corners = [numbers(corner, ("x", "y"), location) for corner in objects_in(shape, "polygon", location)]
        return around_polygon(name, [(x, y) for x, y in corners], "polygon", location)
    for key, kind in _WITHOUT_AREA.items():
        if key in shape:
            annotations.skipped.add(kind, location)
            return None
    kind = one_line(str(shape.get("annotation_kind")))[:60]
    raise UserError(f"{location}: {kind} of '{one_line(name)}' is stored at a URL, and nothing is downloaded")
