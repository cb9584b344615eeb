"""Lists the label formats, and determines the format of a split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from data.labels.coco import COCO
from data.labels.label_format import LabelFormat, first_bytes
from data.labels.voc import VOC
from data.labels.yolo import YOLO

LABEL_FORMATS: tuple[LabelFormat, ...] = (YOLO, VOC, COCO)
_MAX_READ_FILES = 20  # files read per folder to recognize their format


def format_of(annotations: Path | None) -> LabelFormat | None:
    """Returns the format of the labels in ``annotations`` (None if the YAML has no such key), or None if it is unknown.

    A folder can have any format with one file per image that is ``in_annotations``; a file can have any format with one
    file per split and its suffix. If there are several, the content decides; if it matches none, the first format
    reports the problem.
    """
    if annotations is None:
        return YOLO
    if os.path.isdir(annotations):
        formats = [form for form in LABEL_FORMATS if form.per_image is not None and form.per_image.in_annotations]
    else:
        suffix = annotations.suffix.lower()
        formats = [form for form in LABEL_FORMATS if form.per_image is None and form.files.suffix == suffix]
    if len(formats) > 1:
        formats.sort(key=lambda form: not _has_labels(annotations, form))
    return formats[0] if formats else None


def _has_labels(annotations: Path, label_format: LabelFormat) -> bool:
    """Returns whether a file, or one of the first files in a folder, contains labels in a format."""
    files: Sequence[Path] = [annotations]
    if annotations.is_dir():
        suffix = label_format.files.suffix
        files = sorted(path for path in annotations.rglob("*") if path.suffix.lower() == suffix)[:_MAX_READ_FILES]
    return any(label_format.files.is_labels(first_bytes(file)) for file in files)
