"""Lists the label formats, those that are recognized and not read, and determines the format of files and folders."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from data.folders import Folders
from data.formats.coco import COCO
from data.formats.csv_table import CSV
from data.formats.cvat import CVAT
from data.formats.label_format import Format
from data.formats.labelme import LABELME
from data.formats.via import VIA
from data.formats.voc import VOC
from data.formats.yolo import YOLO
from utils.errors import UserError
from utils.files.safe_io import open_regular

# Of several formats with a suffix, the last one is that of files without the signature of another.
FORMATS: tuple[Format, ...] = (VOC, LABELME, YOLO, CVAT, CSV, VIA, COCO)
PER_IMAGE = tuple(form for form in FORMATS if form.is_per_image)
_HEAD_BYTES = 1 << 16  # enough to recognize a format


class _Unread(NamedTuple):
    """A format that is recognized and not read."""

    title: str
    suffixes: tuple[str, ...]
    signature: str  # as in `Format`
    remedy: str


_UNREAD = (
    _Unread("CreateML", (".json",), '"coordinates"', "export it as COCO"),
    _Unread("Supervisely", (".json",), '"(classtitle|geometrytype)"', "export it as COCO"),
    _Unread("oriented boxes", (".txt",), r"(?m)^(\S+ ){8}\S+ \d+\s*$", "export it with upright boxes"),
    _Unread(
        "a CSV without a known header",
        (".csv",),
        rf"(?s)^(?!{CSV.signature}).*(\.(jpe?g|png)\b|x_?min|bbox)",
        "begin it with the line filename,xmin,ymin,xmax,ymax,class",
    ),
    _Unread("TFRecord", (".tfrecord", ".record"), "", "export it as COCO"),
    _Unread("Hugging Face", (".parquet", ".jsonl"), "", "convert it with python -m tools.convert FOLDER out.json"),
)


def format_of_file(file: Path) -> Format | None:
    """Returns the format of a label file for all images of a split, None for any other file."""
    candidates = [form for form in FORMATS if not form.is_per_image and form.suffix == file.suffix.lower()]
    head = _head(file) if candidates else ""
    return next((form for form in candidates if re.search(form.signature, head)), None)


def format_of(labels: Path) -> Format | None:
    """Returns the format of what a YAML names as labels: a file for all images; or a folder of a file for each, that of
    most files, but not YOLO if there are others: a .txt may also be a list of classes. None for anything else."""
    if labels.suffix and not labels.is_dir():
        by_suffix = [form for form in FORMATS if not form.is_per_image and form.suffix == labels.suffix.lower()]
        return format_of_file(labels) or next(reversed(by_suffix), None)
    names = (name for _, _, names in os.walk(labels) for name in names)
    counts = Counter(os.path.splitext(name)[1].lower() for name in names)
    return max(PER_IMAGE, key=lambda form: (form is not YOLO and counts[form.suffix] > 0, counts[form.suffix]))


def unread_formats(folder: str, folders: Folders) -> str:
    """Returns a sentence about each format that is not read in and below a folder, by the first file of each folder and
    suffix; "" if there is none."""
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


def _head(file: str | Path) -> str:
    """Returns the start of a file in lower case; "" if it cannot be read."""
    try:
        with open_regular(file) as opened:
            return opened.read(_HEAD_BYTES).decode("utf-8", "replace").lower()
    except (OSError, UserError):
        return ""
