"""Random data sets in each label format have the objects that were written, also behind symbolic links."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.three_formats import Rows, voc_text, write_image, yolo_text

HEIGHT, WIDTH = 48, 64
FOLDERS = ("", "p", "q", "p/deep", "Q2")
STEMS = ("a", "b", "img.v1", "img.v2", "\u00dc1", "e\u03012", "y z", "0001")  # composed and decomposed accents
Objects = dict[str, Rows]  # by the image's name in the split


def random_objects(rng: random.Random) -> Objects:
    """Returns objects of images in one to three folders. About one image in ten is a background."""
    names = [
        os.path.join(folder, stem + rng.choice((".png", ".PNG", ".jpg")))
        for folder in rng.sample(FOLDERS, rng.randint(1, 3))
        for stem in rng.sample(STEMS, rng.randint(1, 3))
    ]
    objects: Objects = {name: [random_row(rng)] * (rng.random() > 0.1) for name in names}
    objects[names[0]] = [random_row(rng)]  # a split without any label file would be refused
    return objects


def random_row(rng: random.Random) -> tuple[int, int, int, int, int]:
    return (0, rng.randint(0, 20), rng.randint(0, 20), rng.randint(30, 60), rng.randint(25, 47))


def write_yolo(root: Path, objects: Objects, rng: random.Random) -> None:
    for name, rows in labeled(objects):
        write(root / "labels/train" / (os.path.splitext(name)[0] + ".txt"), yolo_text(rows, HEIGHT, WIDTH))


def write_voc(root: Path, objects: Objects, rng: random.Random) -> None:
    """Writes files with the images' names or, for some, with other names; then only their content names the image."""
    for number, (name, rows) in enumerate(labeled(objects)):
        text = voc_text(rows, ["a"], HEIGHT, WIDTH)
        stem = rng.choice((os.path.splitext(name)[0], f"annotation-{number}"))
        write(root / "voc" / f"{stem}.xml", text.replace("<annotation>", f"<annotation><filename>{name}</filename>"))


def write_coco(root: Path, objects: Objects, rng: random.Random) -> None:
    images = [{"id": i, "file_name": name, "height": HEIGHT, "width": WIDTH} for i, name in enumerate(objects)]
    annotations = [
        {"id": 100 + i, "image_id": i, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for i, rows in enumerate(objects.values())
        for _, x1, y1, x2, y2 in rows
    ]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}
    write(root / "all.json", json.dumps(content))


def labeled(objects: Objects) -> list[tuple[str, Rows]]:
    return [(name, rows) for name, rows in objects.items() if rows]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def link_folders(root: Path, objects: Objects, rng: random.Random) -> None:
    """Gives each image folder a second name, which comes before or after the first."""
    train = root / "images/train"
    for folder in sorted({os.path.dirname(name) for name in objects} - {""}):
        (train / (rng.choice("0z") + folder.replace("/", "-"))).symlink_to(train / folder)


def read(root: Path) -> DatasetIndex:
    settings = IndexSettings(progress=False, workers=0, max_bad=0.0, use_cache=False)
    return load_index(load_dataset_spec(root / "data.yaml"), "train", settings)


def read_objects(index: DatasetIndex, root: Path) -> dict[str, list[tuple[int, ...]]]:
    """Returns x, y, width and height of the objects, by the image's name in the split without symbolic links."""
    objects = {}
    for i in range(len(index)):
        name = os.path.relpath(os.path.realpath(index.path(i)), os.path.realpath(root / "images/train"))
        assert name not in objects
        boxes = index.boxes_xywh_px[index.offsets[i] : index.offsets[i + 1]]
        objects[name] = sorted(tuple(round(float(value)) for value in box) for box in boxes)
    return objects


@pytest.mark.parametrize(
    ("annotations", "write_labels"), [(None, write_yolo), ("voc", write_voc), ("all.json", write_coco)]
)
def test_random_sets_have_the_objects_that_were_written(
    tmp_path, annotations: str | None, write_labels: Callable[[Path, Objects, random.Random], None]
):
    for seed in range(8):
        rng = random.Random(seed)
        root = tmp_path / str(seed)
        objects = random_objects(rng)
        for name in objects:
            write_image(root / "images/train" / name, HEIGHT, WIDTH)
        write_labels(root, objects, rng)
        content = {"train": "images/train", "val": "images/train", "names": ["a"]}
        if annotations:
            content["annotations"] = annotations
        (root / "data.yaml").write_text(yaml.safe_dump(content))
        expected = {name: [(x1, y1, x2 - x1, y2 - y1) for _, x1, y1, x2, y2 in rows] for name, rows in objects.items()}
        assert read_objects(read(root), root) == expected, f"seed {seed}"
        link_folders(root, objects, rng)
        assert read_objects(read(root), root) == expected, f"seed {seed}, with links"


def test_each_entry_of_a_json_that_several_splits_share_is_used_or_lost_once(tmp_path):
    for seed in range(10):
        rng = random.Random(seed)
        root = tmp_path / str(seed)
        splits = ("train", "val", "test")[: rng.randint(2, 3)]
        names = [
            os.path.join(split, folder, f"{stem}.png")
            for split in splits
            for folder in rng.sample(("", "a", "b", "c/a"), rng.randint(1, 2))
            for stem in rng.sample("uvwxyz", rng.randint(1, 3))
        ]
        for name in names:
            write_image(root / "images" / name, HEIGHT, WIDTH)
        folders = ("", "a/", "val/", "val/a/", "test/b/", "nowhere/", "c/a/")
        absent = [rng.choice(folders) + rng.choice(("gone.png", "u.png", "x.png")) for _ in range(rng.randint(1, 3))]
        entries = list(dict.fromkeys([*names, *absent]))
        rng.shuffle(entries)
        write_coco(root, {name: [random_row(rng)] for name in entries}, rng)
        content = {split: f"images/{split}" for split in splits} | {"annotations": "all.json", "names": ["a"]}
        (root / "data.yaml").write_text(yaml.safe_dump(content))
        settings = IndexSettings(progress=False, workers=0, max_bad=1.0, use_cache=False)
        spec = load_dataset_spec(root / "data.yaml")
        ledgers = [load_index(spec, split, settings).report.ledger for split in splits]
        assert sum(ledger.used_objects + ledger.lost_objects for ledger in ledgers) == len(entries), f"seed {seed}"
