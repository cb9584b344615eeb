"""Lists the label formats, and finds that of a split."""

from __future__ import annotations

from pathlib import Path

from data.labels.coco import COCO
from data.labels.label_format import LabelFormat
from data.labels.voc import VOC
from data.labels.yolo import YOLO

LABEL_FORMATS: tuple[LabelFormat, ...] = (YOLO, VOC, COCO)


def format_of(annotations: Path | None) -> LabelFormat | None:
    """Returns the format of the labels in ``annotations`` (None: the YAML has no such key); None if it is unknown."""
    if annotations is None:
        return YOLO
    if annotations.is_dir():
        return VOC
    for label_format in LABEL_FORMATS:
        if label_format.per_image is None and annotations.suffix.lower() == label_format.files.suffix:
            return label_format
    return None
