"""Reads Pascal VOC XML: one file per image, objects with a name and the corners xmin, ymin, xmax, ymax in pixels.

As in annotation tools and converters to YOLO txt, the width is xmax - xmin, without the shift by one for VOC's 1-based
pixels. ``difficult`` objects are treated like all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import isfinite
from xml.etree import ElementTree

from data.labels.findings import BAD_ROW, UNKNOWN_CLASS, Finding
from data.labels.label_format import (
    LabelFileError,
    LabelFormat,
    LabelPerImage,
    LabelRow,
    LabelSource,
    Listing,
    RawLabels,
)
from utils.files.xml_files import LINE, XmlError, parse_xml
from utils.strings import is_plain_number_text

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_SIDE = re.compile(r"0*([1-9]\d{0,8})(?:\.0*)?", re.ASCII)  # some tools write a float
_BOX_TAGS = ("bndbox", "xmin")  # an element with either child has a box


def parse_voc(data: bytes, class_ids: Mapping[str, int] | None) -> RawLabels:
    """Parses a file into rows in pixels, with the image size that the file states.

    The row number is the line of the ``<object>``. ``class_ids``: class indices by name; None if every object is of
    class 0. Raises LabelFileError for other files.
    """
    root = _parse(data)
    labels = RawLabels([], [], _size_hw(root))
    for element in _boxed(root):
        labels.add(_parse_object(element, int(element.attrib[LINE]), class_ids))
    return labels


def _parse(data: bytes) -> ElementTree.Element:
    try:
        root = parse_xml(data)
    except XmlError as error:
        raise LabelFileError(error.reason, error.line) from None
    if root.tag != "annotation":
        raise LabelFileError(f"<{root.tag}> where VOC has <annotation>", int(root.attrib[LINE]))
    return root


def _size_hw(root: ElementTree.Element) -> tuple[int, int] | None:
    """Returns the image size that a file states; None if it states none, or what no image can have: some tools write
    zeros."""
    height, width = (_SIDE.fullmatch(root.findtext(f"size/{side}", "").strip()) for side in ("height", "width"))
    return (int(height[1]), int(width[1])) if height and width else None


def _boxed(root: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yields the <object> elements and others with a box, in file order. Tools may wrap them in <objects> and the like.
    The <part>s of an object are not objects."""
    pending = [*reversed(root)]
    while pending:
        element = pending.pop()
        if element.tag == "object" or any(child.tag in _BOX_TAGS for child in element):
            yield element
        else:
            pending += reversed(element)


def _parse_object(
    element: ElementTree.Element, row_number: int, class_ids: Mapping[str, int] | None
) -> LabelRow | Finding:
    """Returns the box of an <object>, or its problem."""
    if element.tag != "object":
        return Finding(BAD_ROW, f"<{element.tag}> with a box where VOC has <object>", row_number=row_number)
    fields = element.findall("name")
    for box in element.findall("bndbox"):
        fields += [child for child in box if child.tag in _CORNERS]
    texts = {field.tag: (field.text or "").strip() for field in fields}
    missing = [tag for tag in ("name", *_CORNERS) if not texts.get(tag)]
    if missing:
        return Finding(BAD_ROW, f"object without {', '.join(missing)}", row_number=row_number)
    if len(fields) > len(texts):
        return Finding(BAD_ROW, "object with two names or boxes", row_number=row_number)
    name = texts["name"]
    corners = [texts[tag] for tag in _CORNERS]
    shown = ", ".join(corners)[:60]
    try:
        x1, y1, x2, y2 = map(float, corners)
    except ValueError:
        return Finding(BAD_ROW, f"corners are not numbers: {shown}", row_number=row_number)
    if not is_plain_number_text("".join(corners)) or not all(map(isfinite, (x1, y1, x2, y2))):
        return Finding(BAD_ROW, f"corners are not finite numbers: {shown}", row_number=row_number)
    if class_ids is not None and name not in class_ids:
        return Finding(UNKNOWN_CLASS, f"'{name}'", xyxy_px=(x1, y1, x2, y2), row_number=row_number)
    class_id = 0 if class_ids is None else class_ids[name]
    return (class_id, x1, y1, x2, y2, (x2 - x1) * (y2 - y1), 0, row_number, 0)


def object_names(data: bytes) -> set[str]:
    """Returns the names of a file's objects, or an empty set for a file that is not a VOC annotation."""
    try:
        elements = list(_boxed(_parse(data)))
    except LabelFileError:
        return set()
    names = [name.text or "" for element in elements if element.tag == "object" for name in element.iterfind("name")]
    return {name.strip() for name in names} - {""}


def _read(listing: Listing, names: tuple[str, ...] | None) -> LabelSource:
    class_ids = None if names is None else {name: i for i, name in enumerate(names)}
    return LabelPerImage(listing, partial(parse_voc, class_ids=class_ids), normalized=False)


def _num_objects(data: bytes) -> int:
    return len(re.findall(rb"<object[\s>]", data.replace(b"\0", b"")))  # dropping zeros also matches UTF-16


VOC = LabelFormat(
    name="voc", suffix=".xml", is_per_image=True, in_annotations=True, read=_read, num_objects=_num_objects
)
