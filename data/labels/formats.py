"""The label formats, of which a data set's own is imported."""

from __future__ import annotations

from pathlib import Path

from data.labels.label_format import LabelFormat
from data.labels.yolo import YOLO

ANNOTATIONS = "a COCO .json nor a folder of VOC .xml"  # what 'annotations' names, for "neither ..."


def format_of(annotations: Path | None) -> LabelFormat | None:
    """The format of the labels that ``annotations`` of a YAML names (None: it has none); None: unknown."""
    if annotations is None:
        return YOLO
    if annotations.is_dir():
        from data.labels.voc import VOC

        return VOC
    if annotations.suffix.lower() == ".json":
        from data.labels.coco import COCO

        return COCO
    return None
