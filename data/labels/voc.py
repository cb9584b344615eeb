"""Pascal VOC XML: one file per image, objects with a name and the corners xmin, ymin, xmax, ymax in pixels.

As in annotation tools and converters to YOLO txt, the width is xmax - xmin, without the shift by one of VOC's 1-based
pixels. ``difficult`` objects are treated like all others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

from data.labels.clean import CORNERS, LabelFileError, RawLabels, RowProblem, is_plain_number_text
from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.label_format import ImageFile, LabelFile, LabelFormat, LabelPerImage, LabelSource
from utils.files.schema import suggestion
from utils.files.xml_files import LINE, XmlError, parse_xml

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def parse_voc(data: bytes, class_ids: Mapping[str, int] | None) -> RawLabels:
    """Parses a file to rows in pixels, with the image size that the file states. Lines are those of ``<object>``.
    ``class_ids``: by name; None: every object is of class 0. Raises LabelFileError if it is not a VOC annotation."""
    root = _parse(data)
    size = [root.findtext(f"size/{side}", "").strip() for side in ("height", "width")]
    is_known = all(text.isdecimal() and len(text) < 10 and int(text) for text in size)  # some tools write zeros
    labels = RawLabels([], [], (int(size[0]), int(size[1])) if is_known else None)
    for element in root.findall("object"):
        labels.add(_parse_object(element, int(element.attrib[LINE]), class_ids))
    return labels


def object_names(data: bytes) -> set[str]:
    """The names of a file's objects; none of a file that is not a VOC annotation."""
    try:
        names = _parse(data).iterfind("object/name")
    except LabelFileError:
        return set()
    return {name for element in names if (name := (element.text or "").strip())}


def _parse(data: bytes) -> ElementTree.Element:
    try:
        root = parse_xml(data)
    except XmlError as error:
        raise LabelFileError(str(error)) from None
    if root.tag != "annotation":
        raise LabelFileError(f"{root.attrib[LINE]}: <{root.tag}> where VOC has <annotation>")
    return root


def _parse_object(element: ElementTree.Element, line: int, class_ids: Mapping[str, int] | None) -> tuple | RowProblem:
    fields: dict[str, str] = {}
    boxes = element.findall("bndbox")
    found = [*element.findall("name"), *(f for box in boxes[:1] for f in box if f.tag in _CORNERS)]
    ambiguous = "two <bndbox>" if len(boxes) > 1 else ""
    for field in found:
        if len(field):
            ambiguous = f"<{field[0].tag}> inside <{field.tag}>"
        elif field.tag in fields:
            ambiguous = f"two <{field.tag}>"
        fields[field.tag] = (field.text or "").strip()
    if ambiguous:
        return RowProblem(line, BAD_ROW, f"object with {ambiguous}")
    if missing := [tag for tag in ("name", *_CORNERS) if not fields.get(tag)]:
        return RowProblem(line, BAD_ROW, f"object without {', '.join(missing)}")
    name, *corners = (fields[tag] for tag in ("name", *_CORNERS))
    shown = repr(" ".join(corners)[:60])
    try:
        if not all(map(is_plain_number_text, corners)):
            raise ValueError
        x1, y1, x2, y2 = map(float, corners)
    except ValueError:
        return RowProblem(line, BAD_ROW, f"corners are not numbers: {shown}")
    if not all(map(isfinite, (x1, y1, x2, y2))):
        return RowProblem(line, NOT_FINITE, f"corners {shown}")
    if class_ids is not None and name not in class_ids:
        text = f"'{name}' is not in the names{suggestion(name, class_ids)}; left out"
        return RowProblem(line, UNKNOWN_CLASS, text, xyxy=(x1, y1, x2, y2))
    class_id = 0 if class_ids is None else class_ids[name]
    return (class_id, x1, y1, x2, y2, (x2 - x1) * (y2 - y1), 0, line)


def _read(images: list[ImageFile], files: list[LabelFile], root: Path, names: tuple[str, ...] | None) -> LabelSource:
    class_ids = None if names is None else {name: i for i, name in enumerate(names)}
    return LabelPerImage(images, files, root, names, partial(parse_voc, class_ids=class_ids), normalized=False)


def _label_path(image: ImageFile, root: Path, annotations: Path, exists: Callable[[str], bool]) -> str:
    """Mirrors the image's path in the split's folder, or else all XML files are in one folder."""
    path = os.path.join(annotations, os.path.splitext(image.key)[0] + ".xml")
    if exists(path):
        return path
    flat = os.path.join(annotations, os.path.basename(path))
    return flat if exists(flat) else path


VOC = LabelFormat("voc", CORNERS, _read, _label_path)
