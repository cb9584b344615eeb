"""Lists the label formats, and determines the format of a split."""

from __future__ import annotations

import os
from pathlib import Path

from data.labels.coco import COCO
from data.labels.label_format import LabelFormat
from data.labels.voc import VOC
from data.labels.yolo import YOLO

__all__ = ["COCO", "LABEL_FORMATS", "VOC", "YOLO", "LabelFormat", "format_of"]
LABEL_FORMATS: tuple[LabelFormat, ...] = (
    YOLO,  # a .txt per image, the only one outside `annotations:`
    VOC,  # an .xml per image
    COCO,  # a .json per split
)


def format_of(annotations: Path | None) -> LabelFormat | None:
    """Returns the format of the labels in ``annotations`` (None if the YAML has no such key): a folder has a format
    with a file per image, a file the format with its suffix. Returns None for anything else."""
    if annotations is None:
        return YOLO
    is_folder = os.path.isdir(annotations)
    for label_format in LABEL_FORMATS:
        has_suffix = is_folder or annotations.suffix.lower() == label_format.suffix
        if label_format.in_annotations and label_format.is_per_image == is_folder and has_suffix:
            return label_format
    return None
