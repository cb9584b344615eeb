"""Names label formats that are recognized and not read."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from data.folders import Folders
from utils.errors import UserError
from utils.files.safe_io import open_regular

_HEAD_BYTES = 4096


class _Unread(NamedTuple):
    """A format that is not read."""

    title: str
    suffixes: tuple[str, ...]
    signature: str  # regex that identifies the format by the start of a file
    remedy: str


_UNREAD = (
    _Unread("CreateML", (".json",), r'"coordinates"', "export it as COCO"),
    _Unread("Supervisely", (".json",), r'"(classTitle|geometryType)"', "export it as COCO"),
    _Unread("oriented boxes", (".txt",), r"(?m)^(\S+ ){8}\S+ \d+\s*$", "export it with upright boxes"),
    _Unread(
        "a CSV without a header",
        (".csv",),
        r"^(?!.*xmin).*\.(jpe?g|png)\b",
        "begin it with the line filename,xmin,ymin,xmax,ymax,class",
    ),
    _Unread("TFRecord", (".tfrecord", ".record"), "", "export it as COCO"),
    _Unread("Hugging Face", (".parquet", ".jsonl"), "", "convert it with python -m tools.convert FOLDER out.json"),
)


def unread_formats(folder: str, folders: Folders) -> str:
    """Returns a sentence about each such format in and below a folder, by the first file of each folder and suffix;
    "" if there is none."""
    found: dict[str, str] = {}
    for path in folders.walk(folder, skips_unlisted=True):
        first_of: dict[str, str] = {}
        for name in folders.entries(path):
            first_of.setdefault(os.path.splitext(name)[1].lower(), name)
        for unread in _UNREAD:
            for suffix in unread.suffixes:
                if suffix in first_of and unread.title not in found:
                    file = os.path.join(path, first_of[suffix])
                    if re.search(unread.signature, _head(file)):
                        found[unread.title] = f"; {file} is {unread.title}, which is not read: {unread.remedy}"
    return "".join(found.values())


def _head(file: str) -> str:
    try:
        with open_regular(file) as opened:
            return opened.read(_HEAD_BYTES).decode("utf-8", "replace")
    except (OSError, UserError):
        return ""
