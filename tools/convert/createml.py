"""Reads Apple's CreateML JSON: a list with one entry per image; boxes are centers and sizes in pixels."""

from __future__ import annotations

from pathlib import Path

from data.labels.json_files import load_json
from tools.convert.annotations import AnnotatedBox, Annotations, Entry
from tools.convert.values import image_name, name_of, numbers, objects_in
from utils.schema import check


def read_createml(file: Path, annotations: Annotations) -> None:
    """Adds the boxes of all entries."""
    for position, item in enumerate(check(load_json(file, "a CreateML JSON"), list, str(file))):
        location = f"{file}: entry {position}"
        entry = check(item, dict, location)
        boxes = []
        for annotation in objects_in(entry, "annotation" if "annotation" in entry else "annotations", location):
            coordinates = check(annotation.get("coordinates"), dict, location)
            x, y, w, h = numbers(coordinates, ("x", "y", "width", "height"), location)
            name = name_of(annotation.get("label"), f"{location}: label")
            boxes.append(AnnotatedBox.of_xywh(name, x - w / 2, y - h / 2, w, h))
        image = image_name(entry.get("image", entry.get("imagefilename")), location)
        annotations.add(Entry(image=image, boxes=boxes, location=location, file=file, is_complete=True))
