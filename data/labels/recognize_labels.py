"""Recognizes label files that a split does not read because of their format or name."""

from __future__ import annotations

import re

from data.labels.voc import is_voc
from utils.files.encoding import decode_loosely

_SEPARATOR = r"(?:[^\S\n]*[,;][^\S\n]*|[^\S\n]+)"  # between fields
_ROW_OF_NUMBERS = re.compile(
    rf"\s*\d+(\.0*)?({_SEPARATOR}[-+.\deE]+){{4,}}\s*(\n|$)"
)  # a row of YOLO txt, or one with commas
_OBJECTS_IN_JSON = re.compile(r'"(shapes|annotations|objects|regions)"\s*:\s*\[\s*\{')  # LabelMe, V7, Supervisely


def format_of_labels(head: bytes) -> str:
    """Returns the format of the labels in a file that begins with ``head``, or "" if it seems to contain none."""
    if is_voc(head):
        return "Pascal VOC" if re.search(rb"<object[\s>]", head.replace(b"\0", b"")) else ""
    text = decode_loosely(head)
    if _ROW_OF_NUMBERS.match(text):
        return "rows of numbers"
    return "JSON" if text.lstrip()[:1] in ("{", "[") and _OBJECTS_IN_JSON.search(text) else ""
