"""Reads Pascal VOC XML: one file per image, objects with a name and the corners xmin, ymin, xmax, ymax in pixels.

As in annotation tools and converters to YOLO txt, the width is xmax - xmin, without the shift by one for VOC's 1-based
pixels. ``difficult`` objects are treated like all others.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import unescape
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.label_format import CORNERS, FilesPerImage, LabelFormat, LabelPerImage, LabelRequest, LabelSource
from data.labels.rows import LabelFileError, LabelRow, RawLabels, RowProblem, is_plain_number_text
from utils.files.encoding import EncodingError, decode_xml
from utils.files.xml_files import LINE, XmlError, parse_xml
from utils.schema import suggestion

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_SIDE = re.compile(r"0*([1-9]\d{0,8})(?:\.0*)?", re.ASCII)  # some tools write a float
_BOX_TAGS = ("bndbox", "xmin")  # an element with either child has a box


def parse_voc(data: bytes, class_ids: Mapping[str, int] | None) -> RawLabels:
    """Parses a file into rows in pixels, with the image size that the file states.

    The row number is the line of the ``<object>``, or the object's number if two begin on one line. ``class_ids``:
    class indices by name; None if every object is of class 0. Raises LabelFileError for other files.
    """
    root = _parse(data)
    elements = list(_boxed(root))
    lines = [int(element.attrib[LINE]) for element in elements]
    have_own_lines = len(set(lines)) == len(lines)
    labels = RawLabels([], [], _size_hw(root), root.findtext("filename", "").strip(), is_by_line=have_own_lines)
    for element, row_number in zip(elements, lines if have_own_lines else itertools.count(1)):
        if element.tag == "object":
            labels.add(_parse_object(element, row_number, class_ids))
        else:
            labels.add(RowProblem(row_number, BAD_ROW, f"<{element.tag}> with a box where VOC has <object>"))
    return labels


def _size_hw(root: ElementTree.Element) -> tuple[int, int] | None:
    """Returns the image size that a file states; None if it states none, or what no image can have: some tools write
    zeros."""
    height, width = (_SIDE.fullmatch(root.findtext(f"size/{side}", "").strip()) for side in ("height", "width"))
    return (int(height[1]), int(width[1])) if height and width else None


def object_names(data: bytes) -> set[str]:
    """Returns the names of a file's objects, or an empty set for a file that is not a VOC annotation."""
    try:
        elements = list(_boxed(_parse(data)))
    except LabelFileError:
        return set()
    names = [name.text or "" for element in elements if element.tag == "object" for name in element.iterfind("name")]
    return {name.strip() for name in names} - {""}


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


def _parse(data: bytes) -> ElementTree.Element:
    try:
        root = parse_xml(data)
    except XmlError as error:
        raise LabelFileError(error.reason, error.line) from None
    if root.tag != "annotation":
        raise LabelFileError(f"<{root.tag}> where VOC has <annotation>", int(root.attrib[LINE]))
    return root


def _parse_object(
    element: ElementTree.Element, row_number: int, class_ids: Mapping[str, int] | None
) -> LabelRow | RowProblem:
    """Returns the box of an <object>, or its problem."""
    boxes = element.findall("bndbox")
    elements = element.findall("name")
    if boxes:
        elements += [field for field in boxes[0] if field.tag in _CORNERS]
    ambiguity = _ambiguity(boxes, elements)
    if ambiguity:
        return RowProblem(row_number, BAD_ROW, f"object with {ambiguity}")
    texts = {field.tag: (field.text or "").strip() for field in elements}
    missing = [tag for tag in ("name", *_CORNERS) if not texts.get(tag)]
    if missing:
        return RowProblem(row_number, BAD_ROW, f"object without {', '.join(missing)}")
    return _parse_box(texts["name"], [texts[tag] for tag in _CORNERS], row_number, class_ids)


def _ambiguity(boxes: Sequence[ElementTree.Element], fields: Sequence[ElementTree.Element]) -> str:
    """Describes a repeated or misplaced element of an object; "" if it has none. ``fields``: its name and corners."""
    if len(boxes) > 1:
        return "two <bndbox>"
    tags: set[str] = set()
    for field in fields:
        if len(field):
            return f"<{field[0].tag}> inside <{field.tag}>"
        if field.tag in tags:
            return f"two <{field.tag}>"
        tags.add(field.tag)
    return ""


def _parse_box(
    name: str, corners: Sequence[str], row_number: int, class_ids: Mapping[str, int] | None
) -> LabelRow | RowProblem:
    """Returns the box of an object of the class ``name``, or its problem. ``corners``: numbers as strings."""
    shown = repr(" ".join(corners)[:60])
    try:
        if not all(map(is_plain_number_text, corners)):
            raise ValueError
        x1, y1, x2, y2 = map(float, corners)
    except ValueError:
        return RowProblem(row_number, BAD_ROW, f"corners are not numbers: {shown}", cause="corners are not numbers")
    if not all(map(isfinite, (x1, y1, x2, y2))):
        return RowProblem(row_number, NOT_FINITE, f"corners {shown}")
    if class_ids is not None and name not in class_ids:
        return RowProblem(
            row_number=row_number,
            kind=UNKNOWN_CLASS,
            text=f"'{name}' is not in the names{suggestion(name, class_ids)}",
            consequence="left out",
            class_name=name,
            xyxy=(x1, y1, x2, y2),
        )
    class_id = 0 if class_ids is None else class_ids[name]
    return (class_id, x1, y1, x2, y2, (x2 - x1) * (y2 - y1), 0, row_number, 0)


def _read(request: LabelRequest) -> LabelSource:
    class_ids = None if request.names is None else {name: i for i, name in enumerate(request.names)}
    return LabelPerImage(request, partial(parse_voc, class_ids=class_ids), normalized=False)


def _voc_folders(images: str, below_split: str, annotations: Path | None) -> list[str]:
    """Returns the folders that may contain the XML files of ``images/train/a``: ``images/train/a``, ``train/a`` and
    ``a`` in the annotations, and the annotations themselves. The usual one is the first whose part above
    ``below_split`` exists: for the split ``images/train``, ``train/a`` if there is a folder ``train``, else ``a``."""
    assert annotations is not None, "a split in VOC format names the folder of its XML files"
    parts = Path(os.path.relpath(images, os.path.commonpath((images, annotations)))).parts
    folders = [os.path.join(annotations, *parts[start:]) for start in range(len(parts) + 1)]
    num_above = max(0, len(parts) - len(Path(below_split).parts))
    mirrors = (start for start in range(num_above) if os.path.isdir(os.path.join(annotations, *parts[start:num_above])))
    usual = next(mirrors, num_above)
    return [folders[usual], *folders[:usual], *folders[usual + 1 :]]


def is_voc(head: bytes) -> bool:
    """Returns whether a file that begins with ``head`` is Pascal VOC XML. CVAT's XML begins with <annotations>."""
    return re.search(rb"<annotation[\s>]", head.replace(b"\0", b"")) is not None  # dropping zeros also matches UTF-16


def named_image(head: bytes) -> str:
    """Returns the <filename> in a file that begins with ``head``, or "" if it has none."""
    utf8_head = _without_utf16(head)
    match = re.search(rb"<filename>\s*([^<]+?)\s*</filename>", utf8_head)  # no encoding has a < within a character
    return unescape(_decode_name(match[1], utf8_head)) if match else ""


def _decode_name(name: bytes, head: bytes) -> str:
    """Decodes a name in the file that begins with ``head``: as UTF-8, in the multibyte encoding that the file declares,
    or as Latin-1. The rest of the file, and what it declares, may be wrong."""
    with contextlib.suppress(UnicodeDecodeError):
        return name.decode()
    declaration = head[: head.find(b"?>") + 2]
    with contextlib.suppress(EncodingError):
        text = decode_xml(declaration + name)
        if isinstance(text, str):
            return text[len(declaration) :]
    return name.decode("latin-1")


def _without_image_name(data: bytes) -> bytes:
    """Returns the content of a file, as UTF-8 if it is UTF-16, without the elements that name its image."""
    return re.sub(rb"<(folder|filename|path)>[^<]*</\1>", b"", _without_utf16(data))


def _without_utf16(data: bytes) -> bytes:
    """Returns the content of a file, as UTF-8 if it is UTF-16."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace").encode()
    return data


def _num_objects(data: bytes) -> int:
    return len(re.findall(rb"<object[\s>]", data.replace(b"\0", b"")))


_FILES = FilesPerImage(
    suffix=".xml",
    is_labels=is_voc,
    advice="if they are Pascal VOC's, add 'annotations: {entry}' to the YAML",
    label_folders=_voc_folders,
    num_objects=_num_objects,
    in_annotations=True,
    named_image=named_image,
    without_image_name=_without_image_name,
)
VOC = LabelFormat("voc", CORNERS, _read, _FILES)
