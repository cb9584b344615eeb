"""Everything labeled is used or counted as lost, whatever a data set looks like.

Random data sets in each format are compared with a few lines of their own arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import pytest

from data.index import DatasetIndex
from tests.data.data_set import DataSet, coco, load, open_set, voc

SPLITS = ("train", "val", "test")
FOLDERS = ("", "p/", "q/", "p/deep/")
STEMS = ("a", "b", "img.v1", "img.v2", "y z", "\u00dc1", "0001", "f")
# Rows of YOLO, objects of VOC, and boxes of COCO: a used one, then lost ones.
YOLO_ROWS = ("0 0.5 0.5 0.2 0.2", "7 0.5 0.5 0.2 0.2", "0 0.5 0.5", "0 0.5 0.5 0 0.2", "0 3 3 0.2 0.2", "1 nan 1 1 1")
VOC_OBJECTS = (("a", 5, 5, 20, 20), ("?", 5, 5, 20, 20), ("a", 20, 20, 5, 5), ("b", 500, 500, 520, 520))
COCO_BOXES = ((1, 5, 5, 20, 20), (9, 5, 5, 20, 20), (1, 5, 5, -3, 9), (2, 500, 500, 20, 20))


class Expected(NamedTuple):
    """What a split uses, and what it loses."""

    boxes: dict[str, int]  # number of boxes of each used image, by name
    lost_objects: int


class Labels:
    """Random labels: for each object, whether it is used."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def draw(self, least: int = 0) -> list[bool]:
        share = self.rng.choice((0.0, 0.3, 1.0))
        return [self.rng.random() >= share for _ in range(self.rng.randint(least, 3))]

    def draw_orphans(self) -> list[list[bool]]:
        """Draws label files without an image. The first row of each is a box: a file without a row is no label file."""
        drawn = [self.draw() for _ in range(self.rng.randint(0, 3))]
        return [[True, *objects[1:]] if objects else [] for objects in drawn]

    def write(self, objects: Sequence[bool], kinds: Sequence[Any]) -> list[Any]:
        """Returns one of ``kinds`` for each object: the first, or one of the others."""
        return [kinds[0] if is_used else self.rng.choice(kinds[1:]) for is_used in objects]


def expected_of(objects_of_image: dict[str, list[bool]], orphans: Sequence[list[bool]]) -> Expected:
    """An image without a used object is left out, unless it has no objects at all: then it is a background."""
    boxes = {name: sum(objects) for name, objects in objects_of_image.items() if any(objects) or not objects}
    total = sum(map(len, objects_of_image.values())) + sum(map(len, orphans))
    return Expected(boxes, total - sum(boxes.values()))


def draw_names(rng: random.Random, split: str, taken: set[str]) -> list[str]:
    """Draws images of a split, whose stems differ from ``taken``."""
    names = []
    for stem in rng.sample(STEMS, rng.randint(2, 5)):
        if f"{split}{stem}" not in taken:
            names.append(f"images/{split}/{rng.choice(FOLDERS)}{split}{stem}{rng.choice(('.png', '.jpg', '.PNG'))}")
    return names


def label_of(image: str, folder: str, suffix: str) -> str:
    return f"{folder}/{image.removeprefix('images/').rpartition('.')[0]}{suffix}"


def write_yolo(data: DataSet, labels: Labels, splits: Sequence[str]) -> dict[str, Expected]:
    result = {}
    for split in splits:
        objects = {name: labels.draw() for name in draw_names(labels.rng, split, set())}
        objects[f"images/{split}/used.png"] = [True]
        data.images(*objects)
        for name, drawn in objects.items():
            if drawn or labels.rng.random() < 0.5:
                data.file(label_of(name, "labels", ".txt"), "\n".join(labels.write(drawn, YOLO_ROWS)))
        orphans = labels.draw_orphans()
        for number, drawn in enumerate(orphans):
            folder = labels.rng.choice(FOLDERS)
            data.file(f"labels/{split}/{folder}orphan{number}.txt", "\n".join(labels.write(drawn, YOLO_ROWS)))
        result[split] = expected_of(objects, orphans)
    return result


def write_lists(data: DataSet, labels: Labels, splits: Sequence[str]) -> dict[str, Expected]:
    """Each split is a list of some of the images in one folder. Images of other lists are used elsewhere, but labels
    without an image are lost."""
    names = draw_names(labels.rng, "all", set())
    objects = {name: labels.draw() for name in names} | {f"images/all/{split}.png": [True] for split in splits}
    data.images(*objects)
    for name, drawn in objects.items():
        data.file(label_of(name, "labels", ".txt"), "\n".join(labels.write(drawn, YOLO_ROWS)))
    orphans = labels.draw_orphans()
    for number, drawn in enumerate(orphans):
        data.file(f"labels/all/gone{number}.txt", "\n".join(labels.write(drawn, YOLO_ROWS)))
    result = {}
    for split in splits:
        chosen = [f"images/all/{split}.png", *labels.rng.sample(names, labels.rng.randint(0, len(names)))]
        rows = [*chosen, *(f"images/all/gone{i}.png" for i in range(labels.rng.randint(0, 2)))]
        labels.rng.shuffle(rows)
        data.file(f"{split}.txt", "\n".join(rows))
        result[split] = expected_of({name: objects[name] for name in chosen}, orphans)
    return result


def write_voc(
    data: DataSet, labels: Labels, splits: Sequence[str], *, can_drop_split: bool = True
) -> dict[str, Expected]:
    """All splits share a folder, in which a file without an image may be of any of them. The files of a split are at
    the same paths below it, with or without the folder of the split, or directly in it. Lists name the same images as
    the folders."""
    objects: dict[str, dict[str, list[bool]]] = {}
    for split in splits:
        objects[split] = {name: labels.draw() for name in draw_names(labels.rng, split, set())}
        objects[split][f"images/{split}/{split}used.png"] = [True]
        data.images(*objects[split])
        place = labels.rng.choice((0, 1, 2) if can_drop_split else (0, 1))
        for name, drawn in objects[split].items():
            path = label_of(name, "", ".xml")
            places = (path, f"/{path.rpartition('/')[2]}", path.replace(f"/{split}/", "/"))
            data.file(f"voc{places[place]}", voc(*labels.write(drawn, VOC_OBJECTS)))
        data.file(f"{split}.txt", "\n".join(objects[split]))
    orphans = labels.draw_orphans()
    for number, drawn in enumerate(orphans):
        data.file(f"voc/{labels.rng.choice(FOLDERS)}orphan{number}.xml", voc(*labels.write(drawn, VOC_OBJECTS)))
    return {split: expected_of(objects[split], orphans) for split in splits}


def write_coco(data: DataSet, labels: Labels, splits: Sequence[str]) -> dict[str, Expected]:
    """All splits share a JSON, whose entries name images by paths of any length."""
    images = [f"images/{split}/{folder}{stem}.png" for split in splits for folder in ("", "p/", "q/") for stem in "abc"]
    images = labels.rng.sample(images, 12) + [f"images/{split}/{split} used.png" for split in splits]
    images = list(dict.fromkeys(images))
    data.images(*images)
    names = [image.split("/", labels.rng.randint(0, 2))[-1] for image in images]
    names += [f"{folder}{stem}.png" for folder in ("", "p/", "nowhere/") for stem in "ad"]
    entries = []
    for name in dict.fromkeys(names):
        style = labels.rng.choice((str, str.upper, quote, lambda text: text.replace("/", "\\")))
        entries.append((style(name), labels.draw(1)))
    entries += [(f"{split}/{split} used.png", [True]) for split in splits]
    labels.rng.shuffle(entries)
    data.file("all.json", coco([(name, labels.write(drawn, COCO_BOXES)) for name, drawn in entries]))

    objects: dict[str, list[bool]] = {}
    lost = []
    for name, drawn in entries:
        image = fitting_image(name, images)
        if image is None or image in objects:
            lost.append(drawn)
        else:
            objects[image] = drawn
    result = {}
    for split in splits:
        of_split = {image: drawn for image, drawn in objects.items() if image.startswith(f"images/{split}/")}
        result[split] = expected_of(of_split, lost)
    return result


def fitting_image(file_name: str, images: Sequence[str]) -> str | None:
    """Returns the only image whose path ends with a file name: as written, percent-decoded, or in another case."""
    name = file_name.replace("\\", "/")
    forms: list[Callable[[str], str]] = [str, str.lower]
    for form in forms:
        for written in (name, unquote(name)):
            fits = [image for image in images if f"/{form(image)}".endswith(f"/{form(written)}")]
            if fits:
                return fits[0] if len(fits) == 1 else None
    return None


WRITERS = {
    "yolo": (write_yolo, "images/{}", None),
    "lists": (write_lists, "{}.txt", None),
    "voc": (write_voc, "images/{}", "voc"),
    "voc lists": (partial(write_voc, can_drop_split=False), "{}.txt", "voc"),
    "coco": (write_coco, "images/{}", "all.json"),
}


def describe(data: DataSet, splits: Sequence[str], images: str, annotations: str | None) -> Path:
    content: dict[str, Any] = {split: images.format(split) for split in splits}
    if annotations:
        content["annotations"] = dict.fromkeys(splits, annotations)
    return data.yaml(**content)


def content_of(index: DatasetIndex) -> tuple:
    report = index.report
    numbers = (report.used_images, report.used_objects, report.lost_images, report.lost_objects)
    return list(index.paths), index.label_digest(), numbers, list(map(str, report.findings))


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("seed", range(6))
def test_what_is_labeled_is_used_or_lost_in_every_split(data, form, seed):
    rng = random.Random(f"{form} {seed}")
    write, images, annotations = WRITERS[form]
    splits = SPLITS[: rng.randint(1, 3)]
    expected = write(data, Labels(rng), splits)
    describe(data, splits, images, annotations)
    before = {split: load(data.data, split, use_cache=False) for split in splits}
    for split, index in before.items():
        boxes = {path: index.offsets[i + 1] - index.offsets[i] for i, path in enumerate(index.paths)}
        assert boxes == expected[split].boxes, split
        report = index.report
        assert report.used_images == len(boxes)
        assert report.used_objects == sum(boxes.values())
        assert report.lost_objects == expected[split].lost_objects, split

    describe(data, splits[::-1], images, annotations)
    for split in splits:
        assert content_of(load(data.data, split, use_cache=False)) == content_of(before[split])

    data.file("labels/train/classes.txt", "a\nb\n")  # without a row
    for name in ("README.md", "notes.txt", "other/images/train/a.png", "other/labels/train/a.txt", "old.json", "a.xml"):
        data.file(name, "0 0.5 0.5 0.2 0.2\n")
    data.file("images/README.txt", "how these were made")
    for split in splits:
        assert content_of(load(data.data, split, use_cache=False)) == content_of(before[split])


@pytest.mark.parametrize("form", ["yolo", "voc"])
def test_a_declared_split_that_is_missing_costs_the_others_nothing(data, form):
    """Labels that may be of its images are not lost."""
    _, images, annotations = WRITERS[form]
    data.images("images/train/x.png")
    data.file("labels/train/x.txt")
    for stem in ("x", "gone"):
        data.file(f"voc/{stem}.xml", voc(VOC_OBJECTS[0]))
    describe(data, ("train", "val"), images, annotations)
    report = load(open_set(data.data, ["train"])).report
    assert (report.used_objects, report.lost_objects) == (1, 0)
    (data.root / "images/val").mkdir()
    data.images("images/val/other.png")
    report = load(open_set(data.data, ["train"])).report
    assert (report.used_objects, report.lost_objects) == (1, 0 if form == "yolo" else 1)
