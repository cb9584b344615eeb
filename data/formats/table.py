"""Lists the label formats, and determines the format of files and folders."""

from __future__ import annotations

import os
import re
from pathlib import Path

from data.formats.coco import COCO
from data.formats.csv_table import CSV
from data.formats.cvat import CVAT
from data.formats.label_format import Format
from data.formats.labelme import LABELME
from data.formats.via import VIA
from data.formats.voc import VOC
from data.formats.yolo import YOLO
from utils.files.safe_io import open_regular

# Of several formats with a suffix, the last one is that of files without the signature of another.
FORMATS: tuple[Format, ...] = (VOC, LABELME, YOLO, CVAT, CSV, VIA, COCO)
PER_IMAGE = tuple(form for form in FORMATS if form.is_per_image)
_HEAD_BYTES = 1 << 16  # enough to recognize a format


def format_of_file(file: Path) -> Format | None:
    """Returns the format of a label file for all images of a split, None for any other file."""
    candidates = [form for form in FORMATS if not form.is_per_image and form.suffix == file.suffix.lower()]
    if not candidates or not file.is_file():
        return None
    with open_regular(file) as opened:
        head = opened.read(_HEAD_BYTES).lower()
    return next((form for form in candidates if re.search(form.signature.encode(), head)), None)


def format_of(labels: Path) -> Format | None:
    """Returns the format of what a data set names as labels: a file for all images, or a folder of a file for each,
    of Pascal VOC unless it has others. Returns None for anything else."""
    if labels.suffix and not labels.is_dir():
        by_suffix = [form for form in FORMATS if not form.is_per_image and form.suffix == labels.suffix.lower()]
        return format_of_file(labels) or next(reversed(by_suffix), None)
    found: set[Format] = set()
    for _, _, names in os.walk(labels):
        suffixes = {os.path.splitext(name)[1].lower() for name in names}
        found.update(form for form in PER_IMAGE if form.suffix in suffixes)
        if found - {YOLO}:  # a .txt may also be a list of classes
            break
    return next((form for form in PER_IMAGE if form in found), VOC)
