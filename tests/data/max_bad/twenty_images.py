"""A data set of twenty images in all label formats, and changes of its labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec

NAMES = ("cat", "dog")
HEIGHT, WIDTH = 60, 80
IMAGES = [f"{i:02}.png" for i in range(20)]
FORMATS = {"yolo": {}, "voc": {"annotations": "voc"}, "coco": {"annotations": "instances.json"}}
EACH_FORMAT = pytest.mark.parametrize("reader", FORMATS)


def write_yaml(root: Path, reader: str, **content: object) -> Path:
    path = root / "data.yaml"
    splits = {"train": "images/train", "val": "images/train"}
    path.write_text(yaml.safe_dump({**splits, "names": list(NAMES), **FORMATS[reader], **content}))
    return path


def load(path: Path, split: str = "train", change: Callable = lambda spec: spec, **options) -> DatasetIndex:
    return load_index(change(load_dataset_spec(path)), split, IndexSettings(progress=False, workers=0, **options))


def edit_rows(root: Path, name: str, change: Callable[[list], list]) -> None:
    """Replaces the objects of an image in all formats.

    ``change``: gets and returns objects (class, x1, y1, x2, y2) in pixels. A returned class may be any number; a box of
    other than four numbers is written as it is.
    """
    content = json.loads((root / "instances.json").read_text())
    (image_id,) = [image["id"] for image in content["images"] if image["file_name"] == name]
    annotations = content["annotations"]
    rows = change([_row_of(a) for a in annotations if a["image_id"] == image_id])
    content["annotations"] = [a for a in annotations if a["image_id"] != image_id]
    for number, (class_id, *box) in enumerate(rows):
        ids = {"id": 1000 * image_id + number, "image_id": image_id, "category_id": 10 * (class_id + 1)}
        content["annotations"].append(ids | {"bbox": _coco_box(box)})
    (root / "instances.json").write_text(json.dumps(content))
    stem = name.removesuffix(".png")
    lines = [f"{class_id} {' '.join(map(str, _yolo_box(box)))}\n" for class_id, *box in rows]
    (root / "labels/train" / f"{stem}.txt").write_text("".join(lines))
    objects = [_voc_object(class_id, box) for class_id, *box in rows]
    (root / "voc" / f"{stem}.xml").write_text(f"<annotation>\n{''.join(objects)}</annotation>")


def _row_of(annotation: dict) -> tuple:
    x, y, width, height = annotation["bbox"]
    return (annotation["category_id"] // 10 - 1, x, y, x + width, y + height)


def _coco_box(box: list) -> list:
    if len(box) != 4:
        return box
    x1, y1, x2, y2 = box
    return [x1, y1, x2 - x1, y2 - y1]


def _yolo_box(box: list) -> list:
    if len(box) != 4:
        return box
    x1, y1, x2, y2 = box
    return [(x1 + x2) / 2 / WIDTH, (y1 + y2) / 2 / HEIGHT, (x2 - x1) / WIDTH, (y2 - y1) / HEIGHT]


def _voc_object(class_id: int, box: list) -> str:
    name = NAMES[class_id] if class_id < len(NAMES) else f"class{class_id}"
    corners = "".join(f"<{tag}>{v}</{tag}>" for tag, v in zip(("xmin", "ymin", "xmax", "ymax"), box))
    return f"<object><name>{name}</name><bndbox>{corners}</bndbox></object>\n"


def edit_json(root: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((root / "instances.json").read_text())
    change(content)
    (root / "instances.json").write_text(json.dumps(content))


def one_good_row_of_ten(rows: list) -> list:
    return rows[:1] + [(0, 1, 2)] * 9


def with_unknown_class(rows: list) -> list:
    return [rows[0], (7, *rows[1][1:])]


def change_annotations(change: Callable[[dict, int], object]) -> Callable[[dict], None]:
    """Returns a change of a COCO JSON that calls ``change`` for each annotation and its position."""

    def changed(content: dict) -> None:
        for position, annotation in enumerate(content["annotations"]):
            change(annotation, position)

    return changed


def change_entries(key: str, change: Callable[[dict], object]) -> Callable[[dict], None]:
    """Returns a change of a COCO JSON that calls ``change`` for each entry of the list ``key``."""

    def changed(content: dict) -> None:
        for entry in content[key]:
            change(entry)

    return changed


def move_half_to_folder(root: Path, reader: str) -> Path:
    """Moves half of the images to a folder that the YAML does not name. Returns the YAML."""
    (root / "images/more").mkdir()
    for name in IMAGES[10:]:
        (root / "images/train" / name).rename(root / "images/more" / name)
    return write_yaml(root, reader)


def rename_every_second_class(root: Path) -> None:
    """Gives every second object a class without a name, in all formats."""
    for name in IMAGES:
        edit_rows(root, name, with_unknown_class)


def flatten_dogs(root: Path) -> None:
    """Gives every dog a box without area, in all formats: half of the objects are lost whatever classes are used."""
    for name in IMAGES:
        edit_rows(root, name, lambda rows: [rows[0], (1, 45, 20, 45, 35)])
