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
    """Replaces the objects of an image, (class, x1, y1, x2, y2) in pixels with a class of any number or name, in all
    formats. A box of other than four numbers is no box."""
    stem = name.removesuffix(".png")
    content = json.loads((root / "instances.json").read_text())
    (image_id,) = [image["id"] for image in content["images"] if image["file_name"] == name]
    image_annotations = [a for a in content["annotations"] if a["image_id"] == image_id]
    rows = []
    for a in image_annotations:
        x, y, w, h = a["bbox"]
        rows.append((a["category_id"] // 10 - 1, x, y, x + w, y + h))
    rows = change(rows)
    others = [a for a in content["annotations"] if a["image_id"] != image_id]
    text = ""
    xml = ""
    for number, (class_id, *box) in enumerate(rows):
        annotation = {"id": 1000 * image_id + number, "image_id": image_id, "category_id": 10 * (class_id + 1)}
        x1, y1, x2, y2 = (*box, 0, 0, 0, 0)[:4]
        if len(box) == 4:
            others.append(annotation | {"bbox": [x1, y1, x2 - x1, y2 - y1]})
            size = (x2 - x1) / WIDTH, (y2 - y1) / HEIGHT
            text += f"{class_id} {(x1 + x2) / 2 / WIDTH} {(y1 + y2) / 2 / HEIGHT} {size[0]} {size[1]}\n"
        else:
            others.append(annotation | {"bbox": box})
            text += f"{class_id} {' '.join(map(str, box))}\n"
        corners = "".join(f"<{t}>{v}</{t}>" for t, v in zip(("xmin", "ymin", "xmax", "ymax"), box))
        class_name = NAMES[class_id] if class_id < len(NAMES) else f"class{class_id}"
        xml += f"<object><name>{class_name}</name><bndbox>{corners}</bndbox></object>\n"
    (root / "labels/train" / f"{stem}.txt").write_text(text)
    (root / "voc" / f"{stem}.xml").write_text(f"<annotation>\n{xml}</annotation>")
    (root / "instances.json").write_text(json.dumps(content | {"annotations": others}))


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
