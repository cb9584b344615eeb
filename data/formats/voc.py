"""Reads Pascal VOC XML: one file per image, objects with a name and the corners xmin, ymin, xmax, ymax in pixels.

As in annotation tools and converters to YOLO txt, the width is xmax - xmin, without the shift by one for VOC's 1-based
pixels. ``difficult`` objects are treated like all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from data.formats.label_format import Box, Classes, Entry, Format, LabelFileError, plain_float, rows_of, stated_size
from utils.files.xml_files import LINE, XmlError, parse_xml

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_BOX_TAGS = ("bndbox", "xmin")  # an element with either child has a box


def read_xml(data: bytes, tag: str) -> Element:
    """Returns the root element of a file. Raises LabelFileError for malformed XML, and for one with another ``tag``."""
    try:
        root = parse_xml(data)
    except XmlError as error:
        raise LabelFileError(error.reason, error.line) from None
    if root.tag != tag:
        raise LabelFileError(f"<{root.tag}> where <{tag}> is expected", int(root.attrib[LINE]))
    return root


def read_voc(data: bytes, classes: Classes) -> list[Entry]:
    """Reads a file. The row number is the line of the ``<object>``. Raises LabelFileError for other files."""
    root = read_xml(data, "annotation")
    objects = ((int(element.attrib[LINE]), element) for element in _boxed(root))
    size_hw = stated_size(root.findtext("size/height"), root.findtext("size/width"))
    return [Entry(rows_of(objects, _box, classes), size_hw=size_hw)]


def _boxed(root: Element) -> Iterator[Element]:
    """Yields the <object> elements and others with a box, in file order. Tools may wrap them in <objects> and the like.
    The <part>s of an object are not objects."""
    pending = [*reversed(root)]
    while pending:
        element = pending.pop()
        if element.tag == "object" or any(child.tag in _BOX_TAGS for child in element):
            yield element
        else:
            pending += reversed(element)


def _box(element: Element) -> Box:
    """Returns the box of an <object>. Raises ValueError."""
    if element.tag != "object":
        raise ValueError(f"<{element.tag}> with a box where VOC has <object>")
    fields = element.findall("name")
    for box in element.findall("bndbox"):
        fields += [child for child in box if child.tag in _CORNERS]
    texts = {field.tag: (field.text or "").strip() for field in fields}
    missing = [tag for tag in ("name", *_CORNERS) if not texts.get(tag)]
    if missing:
        raise ValueError(f"object without {', '.join(missing)}")
    if len(fields) > len(texts):
        raise ValueError("object with two names or boxes")
    x1, y1, x2, y2 = (plain_float(texts[tag]) for tag in _CORNERS)
    return Box(texts["name"], x1, y1, x2, y2)


VOC = Format(name="voc", title="Pascal VOC", suffix=".xml", is_per_image=True, read=read_voc)
