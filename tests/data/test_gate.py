"""Labeled data that is not used is held against --max-bad: with each reader, each view of a split, and each command."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

import lockstep
import train
import val
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import IMAGE_ELSEWHERE
from data.samples.sample_weights import tile_weights
from data.samples.tiled_index import TiledIndex
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.open import open_data
from tests.helpers.scripts import PLAIN, SMALL, call, error_of
from tests.helpers.three_formats import write_image, write_three_formats
from tests.helpers.tiny import write_model, write_weights
from tools.check.__main__ import main as check
from tools.kfold.__main__ import main as kfold
from tools.search.__main__ import main as search
from tools.shard.__main__ import main as shard
from tools.shard.write_shards import write_set
from utils.config.settings import Hyperparameters
from utils.distributed.context import DistributedContext
from utils.errors import UserError

NAMES = ("cat", "dog")
HEIGHT, WIDTH = 60, 80
IMAGES = [f"{i:02}.png" for i in range(20)]
FORMATS = {"yolo": {}, "voc": {"annotations": "voc"}, "coco": {"annotations": "instances.json"}}
EACH_FORMAT = pytest.mark.parametrize("reader", FORMATS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twenty images with two objects each, which all formats label: a cat on the left and a dog on the right."""
    root = tmp_path / "set"
    rows = {name: [(0, 5, 10, 30, 40), (1, 45, 20 + i, 70, 35 + i)] for i, name in enumerate(IMAGES)}
    write_three_formats(root, NAMES, dict.fromkeys(IMAGES, (HEIGHT, WIDTH)), rows)
    return root


def describe(root: Path, reader: str, **content: object) -> Path:
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
    mine = [a for a in content["annotations"] if a["image_id"] == image_id]
    rows = []
    for a in mine:
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
        called = NAMES[class_id] if class_id < len(NAMES) else f"class{class_id}"
        xml += f"<object><name>{called}</name><bndbox>{corners}</bndbox></object>\n"
    (root / "labels/train" / f"{stem}.txt").write_text(text)
    (root / "voc" / f"{stem}.xml").write_text(f"<annotation>\n{xml}</annotation>")
    (root / "instances.json").write_text(json.dumps(content | {"annotations": others}))


def edit_json(root: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((root / "instances.json").read_text())
    change(content)
    (root / "instances.json").write_text(json.dumps(content))


def without_area(rows: list) -> list:
    return [(c, x1, y1, x1, y2) for c, x1, y1, x2, y2 in rows]


def one_good_row_of_ten(rows: list) -> list:
    return rows[:1] + [(0, 1, 2)] * 9


def unknown_class(rows: list) -> list:
    return [rows[0], (7, *rows[1][1:])]


def outside(rows: list) -> list:
    return [(c, x1 + 500, y1, x2 + 500, y2) for c, x1, y1, x2, y2 in rows]


# What is done to how many images, how many images and objects of all are lost with it, and what the message names.
DEFECTS = {
    "without area": (without_area, 5, (5, 20), (10, 40), "the boxes have no area"),
    "outside": (outside, 5, (5, 20), (10, 40), "the boxes are outside the image"),
    "one good row of ten": (one_good_row_of_ten, 20, (0, 20), (180, 200), "bad row: 180 objects"),
    "unknown class": (unknown_class, 8, (0, 20), (8, 40), "unknown class: 8 objects"),
}


@EACH_FORMAT
@pytest.mark.parametrize("defect", DEFECTS)
def test_lost_rows_are_held_against_max_bad_with_each_reader(root, reader, defect):
    change, count, images, objects, cause = DEFECTS[defect]
    path = describe(root, reader)
    for name in IMAGES[:count]:
        edit_rows(root, name, change)
    lost = " and ".join(
        f"{each} of {total} {noun}"
        for (each, total), noun in ((images, "images"), (objects, "labeled objects"))
        if each
    )
    for _ in range(2):  # a cached index is judged alike
        with pytest.raises(UserError, match=re.escape(cause)) as refused:
            load(path)
        assert f"{path}: 'train': {lost} can't be used (--max-bad is 0.1): " in str(refused.value)
    share = max(each / total for each, total in (images, objects))
    with pytest.raises(UserError):
        load(path, max_bad=share - 0.01)
    index = load(path, max_bad=share + 0.01)
    assert len(index) == 20 - images[0]
    assert np.diff(index.offsets).all(), "an image with lost rows is a background"
    assert index.incomplete.sum() == count - images[0]


def annotations(change: Callable[[dict, int], object]) -> Callable[[dict], None]:
    """A change of a COCO JSON: of each annotation, and its position."""

    def changed(content: dict) -> None:
        for position, annotation in enumerate(content["annotations"]):
            change(annotation, position)

    return changed


def entries(key: str, change: Callable[[dict], object]) -> Callable[[dict], None]:
    def changed(content: dict) -> None:
        for entry in content[key]:
            change(entry)

    return changed


SAME_IDS = {
    "image_id as text": annotations(lambda a, _: a.update(image_id=str(a["image_id"]))),
    "image_id as a whole float": annotations(lambda a, _: a.update(image_id=float(a["image_id"]))),
    "image_id as the text of a float": annotations(lambda a, _: a.update(image_id=f"{a['image_id']}.0")),
    "image_id as text, every second": annotations(lambda a, i: i % 2 or a.update(image_id=str(a["image_id"]))),
    "category_id as text": annotations(lambda a, _: a.update(category_id=str(a["category_id"]))),
    "category_id as a whole float": annotations(lambda a, _: a.update(category_id=float(a["category_id"]))),
    "ids of images as text": entries("images", lambda entry: entry.update(id=f"00{entry['id']}")),
    "ids of images as whole floats": entries("images", lambda entry: entry.update(id=float(entry["id"]))),
    "ids of categories as whole floats": entries("categories", lambda entry: entry.update(id=float(entry["id"]))),
}


@pytest.mark.parametrize("case", SAME_IDS)
def test_text_and_whole_floats_of_one_number_are_one_id(root, case):
    path = describe(root, "coco")
    before = load(path)
    edit_json(root, SAME_IDS[case])
    after = load(path)
    assert after.report.ledger.losses == ()
    for array in ("offsets", "classes", "boxes_xywh_px"):
        np.testing.assert_array_equal(getattr(after, array), getattr(before, array))


STRAYS = {
    "text": (
        lambda a: a.update(image_id=f"{a['image_id']}x"),
        'image_id "100x" is a string; the images\' ids are numbers',
    ),
    "a fraction": (lambda a: a.update(image_id=a["image_id"] + 0.5), "image_id 100.5 is not among the images' ids"),
    "missing": (lambda a: a.pop("image_id"), "has no image_id"),
    "null": (lambda a: a.update(image_id=None), "image_id null is not among the images' ids"),
    "true": (lambda a: a.update(image_id=True), "image_id true is not among the images' ids"),
    "unknown": (lambda a: a.update(image_id=7), "image_id 7 is not among the images' ids"),
}


@pytest.mark.parametrize("case", STRAYS)
def test_annotations_of_no_image_are_named_and_counted(root, case):
    """Without them half of the images would be backgrounds, on which a perfect model would score badly."""
    change, said = STRAYS[case]
    path = describe(root, "coco")
    edit_json(root, annotations(lambda a, position: position % 4 < 2 and change(a)))
    for split in ("train", "val"):
        with pytest.raises(UserError, match=r"20 of 40 labeled objects can't be used.*annotation without") as refused:
            load(path, split)
        assert f"instances.json: annotation 0: {said}" in str(refused.value)


def test_a_json_without_categories_is_named(root):
    path = describe(root, "coco")
    edit_json(root, lambda content: content.update(categories=[]))
    with pytest.raises(UserError, match="category_id 10 is of an empty list: the categories' ids are missing"):
        load(path)


def test_an_id_that_fits_two_images_is_not_guessed(root):
    path = describe(root, "coco")

    def two_of_one_number(content: dict) -> None:
        content["images"][1]["id"] = "0100"
        for annotation in content["annotations"]:
            annotation["image_id"] = "100"

    edit_json(root, two_of_one_number)
    with pytest.raises(UserError, match=re.escape('image_id "100" matches several of the images\' ids')):
        load(path)


def test_annotated_images_that_the_split_does_not_have_are_counted(root):
    path = describe(root, "coco")

    def renamed(content: dict) -> None:
        for entry in content["images"][::2]:
            entry["file_name"] = f"frame-{entry['file_name']}"

    edit_json(root, renamed)
    text = "10 of 20 images and 20 of 40 labeled objects can't be used (--max-bad is 0.1): annotated image not in "
    text += "the split"
    with pytest.raises(UserError, match=re.escape(text)):
        load(path)
    index = load(path, max_bad=0.5)
    assert len(index) == 10
    edit_json(root, lambda content: content.update(annotations=[]))  # nothing is lost with entries without annotations
    edit_rows(root, IMAGES[0], lambda _: [(0, 1, 2, 30, 40)])
    assert load(path).report.ledger.lost_images == 0


@pytest.mark.parametrize(
    ("count", "apart", "level"),
    [(0, True, 0), (3, True, logging.INFO), (15, True, logging.WARNING), (15, False, logging.INFO)],
)
def test_images_that_a_json_does_not_name_are_named(root, caplog, count, apart, level):
    """They are not labeled, so nothing is lost; if they are most of the folder, it may be another folder's JSON, unless
    two splits with a JSON each have their images in one folder."""

    def forget(content: dict) -> None:
        kept = {entry["id"] for entry in content["images"] if entry["file_name"] >= IMAGES[count]}
        content["images"] = [entry for entry in content["images"] if entry["id"] in kept]
        content["annotations"] = [each for each in content["annotations"] if each["image_id"] in kept]

    whole = (root / "instances.json").read_text()
    edit_json(root, forget)
    (root / "others.json").write_text(whole)
    path = describe(
        root, "coco", annotations={"train": "instances.json", "val": "instances.json" if apart else "others.json"}
    )
    said = f"instances.json doesn't name {count} of 20 images, which are left out, first images/train/00.png"
    for _ in range(2):  # scanned and cached
        caplog.clear()
        with caplog.at_level(logging.INFO, "lockstep"):
            index = load(path)
        assert len(index) == 20 - count
        assert index.report.ledger.losses == ()
        records = [record for record in caplog.records if "doesn't name" in record.message]
        assert [record.levelno for record in records] == ([level] if level else [])
        assert all(said in record.message for record in records)


def test_advice_from_the_cache_is_that_of_a_scan_after_another_split_has_changed(root):
    """The images that a JSON does not name may be those of another split."""
    whole = (root / "instances.json").read_text()
    (root / "others.json").write_text(whole)
    edit_json(root, lambda content: content.update(images=content["images"][:5], annotations=[]))
    edit_json(root, lambda content: content.update(annotations=json.loads(whole)["annotations"][:2]))
    said = []
    for val_file in ("others.json", "instances.json", "others.json"):
        path = describe(root, "coco", annotations={"train": "instances.json", "val": val_file})
        report = load(path, max_bad=1.0).report
        said.append((len(report.advice), len(report.notes)))
    assert said[0] == said[2]
    assert said[1][0] == said[0][0] + 1


ONE_FILE = pytest.mark.parametrize("reader", ["coco", "voc"])


def in_folders(root: Path, reader: str) -> Path:
    """The YAML names the folder of half of the images."""
    (root / "images/more").mkdir()
    for name in IMAGES[10:]:
        (root / "images/train" / name).rename(root / "images/more" / name)
    return describe(root, reader)


def in_lists(root: Path, reader: str) -> Path:
    """The lists name eight images of each split."""
    for split, names in (("train", IMAGES[:8]), ("val", IMAGES[8:16])):
        (root / f"{split}.txt").write_text("".join(f"images/train/{name}\n" for name in names))
    return describe(root, reader, train="train.txt", val="val.txt")


@ONE_FILE
@pytest.mark.parametrize("choose", [in_folders, in_lists])
def test_labels_of_images_that_no_split_names_are_not_lost(root, tmp_path, reader, choose):
    """In YOLO txt, the files of other images are in other folders. Here the user has chosen the images."""
    path = choose(root, reader)
    staged = open_data(DataSource(str(path), ("train",), stage=str(tmp_path / "stage")), DistributedContext.single())
    for spec in (load_dataset_spec(path), staged):
        index = load_index(spec, "train", IndexSettings(progress=False, workers=0))
        assert len(index) in (8, 10)
        assert index.report.ledger.losses == ()
        is_doubtful = reader == "coco" and choose is in_folders  # bare file names may be those of deleted images, too
        assert [finding.kind for finding in index.report.findings] == [IMAGE_ELSEWHERE] * (10 * is_doubtful)


@pytest.mark.parametrize("position", [0, 20])
def test_of_two_entries_of_an_image_the_one_with_annotations_is_taken(root, position):
    """With the other one, the image would be a background."""
    path = describe(root, "coco")
    edit_json(root, lambda content: content["images"].insert(position, {**content["images"][0], "id": 7}))
    index = load(path)
    assert np.diff(index.offsets).tolist() == [2] * 20
    assert index.report.ledger.losses == ()


@pytest.mark.parametrize("written", [" {}.png ", "./{}.png", "images\\train\\{}.png", "{}%2Epng"])
def test_names_of_images_are_read_as_tools_write_them(root, written):
    path = describe(root, "coco")
    edit_json(root, entries("images", lambda e: e.update(file_name=written.format(e["file_name"][:2]))))
    assert load(path).report.ledger.losses == ()


@pytest.mark.parametrize("name", ["", " ", "/", "..", "images/", "a\0b.png"])
def test_names_that_are_none_are_named_and_counted(root, name):
    path = describe(root, "coco")
    edit_json(root, lambda content: content["images"][0].update(file_name=name))
    (loss,) = load(path).report.ledger.losses
    assert (loss.images, loss.objects) == (1, 2)
    assert "instances.json: image 100: " in loss.example


def test_two_names_of_one_folder_have_the_same_images(root):
    """The JSON names images without their folder, and the splits name it by way of a link and without."""
    (root / "link").symlink_to("images/train")
    path = describe(root, "coco", train="link")
    for split in ("train", "val"):
        index = load(path, split)
        assert len(index) == 20
        assert index.report.ledger.losses == ()


@pytest.mark.parametrize("reader", ["yolo", "coco"])
def test_a_hidden_image_is_named(root, caplog, reader):
    path = describe(root, reader)
    (root / "images/train/00.png").rename(root / "images/train/.00.png")
    (root / "labels/train/00.txt").rename(root / "labels/train/.00.txt")
    (root / "images/train/._01.png").write_bytes(b"the resource fork of macOS")
    assert len(load(path)) == 19
    (said,) = [line for line in caplog.messages if "1 file left out" in line]
    assert said.endswith("first images/train/.00.png: is hidden because its name begins with a dot; rename it")


def in_two_lists(root: Path) -> Path:
    """Sixteen images are for training; a row of the list names the one that is missing."""
    for split, names in (("train", IMAGES[:16]), ("val", IMAGES[16:])):
        (root / f"{split}.txt").write_text("".join(f"images/train/{name}\n" for name in names))
    return describe(root, "coco", train="train.txt", val="val.txt")


def in_two_folders(root: Path) -> Path:
    (root / "images/val").mkdir()
    for name in IMAGES[16:]:
        (root / "images/train" / name).rename(root / "images/val" / name)
    return describe(root, "coco", val="images/val")


def in_named_folders(root: Path) -> Path:
    """The JSON names images with their folders, and the missing one in that of the second split."""
    path = in_two_folders(root)
    position = {name: i for i, name in enumerate(IMAGES)}
    folders = entries("images", lambda e: e.update(file_name=f"{'train' if position[e['file_name']] > 3 else 'val'}/"))
    names = [entry["file_name"] for entry in json.loads((root / "instances.json").read_text())["images"]]
    edit_json(root, folders)
    edit_json(root, lambda content: [e.update(file_name=e["file_name"] + n) for e, n in zip(content["images"], names)])
    return path


@pytest.mark.parametrize(
    ("divide", "train", "val"),
    [(in_two_lists, (15, 2), (4, 0)), (in_two_folders, (15, 2), (4, 0)), (in_named_folders, (15, 0), (4, 2))],
)
def test_an_image_that_is_missing_from_one_split_is_not_charged_to_all(root, tmp_path, divide, train, val):
    """One JSON has the labels of all splits, and one image does not exist."""
    path = divide(root)
    (root / "images/train/03.png").unlink()
    staged = DataSource(str(path), ("train", "val"), stage=str(tmp_path / "stage"))
    for spec in (load_dataset_spec(path), open_data(staged, DistributedContext.single())):
        for split, (images, objects) in (("train", train), ("val", val)):
            ledger = load_index(spec, split, IndexSettings(progress=False, max_bad=0.5)).report.ledger
            lost = (ledger.used_images, ledger.lost_images, ledger.lost_objects)
            assert lost == (images, int(objects > 0), objects)


def test_annotations_of_no_image_are_lost_in_the_first_split_of_a_json(root, caplog):
    path = in_two_folders(root)
    edit_json(root, lambda content: content["annotations"].extend({"id": i, "image_id": 7} for i in range(500, 510)))
    assert [load(path, split, max_bad=0.5).report.ledger.lost_objects for split in ("train", "val")] == [10, 0]
    with caplog.at_level(logging.INFO, "lockstep"):
        load(path, "val")
    assert "10 losses may belong to an earlier split, which counts them" in caplog.text


def test_each_loss_of_no_image_counts_in_one_of_three_splits(root):
    """Two annotations without an image, and two annotated images that do not exist."""
    for split, start, end in (("val", 6, 13), ("test", 13, 20)):
        (root / "images" / split).mkdir()
        for name in IMAGES[start:end]:
            (root / "images/train" / name).rename(root / "images" / split / name)
    path = describe(root, "coco", val="images/val", test="images/test")
    edit_json(root, lambda content: content["annotations"].extend({"id": i, "image_id": 7} for i in (500, 501)))
    for folder, name in (("train", IMAGES[0]), ("val", IMAGES[6])):
        (root / "images" / folder / name).unlink()
    ledgers = [load(path, split, max_bad=0.9).report.ledger for split in ("train", "val", "test")]
    assert sum(ledger.lost_images for ledger in ledgers) == 2
    assert sum(ledger.lost_objects for ledger in ledgers) == 2 + 2 * 2


def test_a_loss_that_only_some_splits_may_have_counts_in_one_of_them(root, caplog):
    """The JSON names an image with a folder of the second and the third split."""
    for split, folder, start, end in (("train", "b", 0, 14), ("val", "a", 14, 17), ("test", "a", 17, 20)):
        (root / "images" / split / folder).mkdir(parents=True)
        for name in IMAGES[start:end]:
            (root / "images/train" / name).rename(root / "images" / split / folder / name)
    path = describe(root, "coco", val="images/val", test="images/test")
    edit_json(root, lambda content: content["images"][0].update(file_name="a/gone.png"))
    ledgers = {split: load(path, split, max_bad=0.9).report.ledger for split in ("train", "val", "test")}
    lost = {split: (ledger.lost_images, ledger.lost_objects) for split, ledger in ledgers.items()}
    assert lost == {"train": (0, 0), "val": (1, 2), "test": (0, 0)}
    with caplog.at_level(logging.INFO, "lockstep"):
        load(path, "test", max_bad=0.9)
    assert "1 loss may belong to an earlier split, which counts them" in caplog.text


def test_an_image_that_is_missing_behind_a_link_is_lost_in_its_split(root):
    """The JSON names it in the folder by a link, which is not the usual name of the other images there."""
    (root / "images/val/cam").mkdir(parents=True)
    for name in IMAGES[16:]:
        (root / "images/train" / name).rename(root / "images/val/cam" / name)
    (root / "images/val/link").symlink_to("cam")
    path = describe(root, "coco", val="images/val")
    edit_json(root, lambda content: content["images"][0].update(file_name="link/gone.png"))
    ledgers = [load(path, split, max_bad=0.9).report.ledger for split in ("train", "val")]
    assert [ledger.lost_images for ledger in ledgers] == [0, 1]


@pytest.mark.parametrize("seed", [4, 7, 45])
def test_each_object_of_a_json_of_several_splits_is_used_or_lost_once(tmp_path, seed):
    """Splits of random folders, some with a second name by a link; the JSON also names images that do not exist."""
    rng = random.Random(seed)
    names = []
    content: dict[str, object] = {"names": ["a"], "annotations": "all.json"}
    for split in ("train", "val", "test")[: rng.randint(2, 3)]:
        content[split] = f"images/{split}"
        for folder in rng.sample(["a", "b", "c/a"], rng.randint(1, 2)):
            for stem in rng.sample("uvwxyz", rng.randint(1, 3)):
                names.append(f"{split}/{folder}/{stem}.png")
                write_image(tmp_path / "images" / names[-1], 20, 40)
            if rng.random() < 0.5:
                (tmp_path / "images" / split / f"l{folder[0]}").symlink_to(folder)
    folders = ["", "a/", "la/", "val/a/", "test/b/", "nowhere/", "c/a/"]
    names += sorted({rng.choice(folders) + rng.choice(["gone.png", "u.png", "x.png"]) for _ in range(3)})
    rng.shuffle(names)
    boxes = [[2, 2, 9, i + 1] for i in range(len(names))]
    coco = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [{"id": i, "image_id": i, "category_id": 1, "bbox": box} for i, box in enumerate(boxes)],
        "categories": [{"id": 1, "name": "a"}],
    }
    (tmp_path / "all.json").write_text(json.dumps(coco))
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump(content))
    ledgers = [load(path, split, max_bad=1.0).report.ledger for split in ("train", "val", "test") if split in content]
    assert sum(ledger.objects for ledger in ledgers) == len(names)


def test_another_image_of_the_same_name_does_not_hide_a_repeated_entry(root):
    in_folders(root, "coco")
    write_image(root / "images/more" / IMAGES[0], HEIGHT, WIDTH)
    path = describe(root, "coco")

    def repeat(name: str) -> Callable[[dict], None]:
        def change(content: dict) -> None:
            content["images"].append({"id": 7, "file_name": name})
            content["annotations"].append({**content["annotations"][0], "id": 999, "image_id": 7})

        return change

    edit_json(root, repeat(f"more/{IMAGES[0]}"))
    assert load(path).report.ledger.losses == ()
    edit_json(root, lambda content: content["images"][-1].update(file_name=IMAGES[0]))
    (loss,) = load(path).report.ledger.losses
    assert "matches images/train/00.png, which is already used by another entry" in loss.example


@pytest.mark.parametrize("name", ["id", "name"])
@pytest.mark.parametrize("named", [True, False])
def test_categories_are_named_as_they_are_written(root, name, named):
    path = describe(root, "coco", **({} if named else {"names": None}))
    edit_json(root, lambda content: content["categories"][1].update({name: {"id": "2"}.get(name)}))
    said = {"id": 'id "2" is a string; category ids must be integers', "name": "name null is not a string"}[name]
    with pytest.raises(UserError, match=re.escape(f"{root / 'instances.json'}: categories[1]: {said}")):
        load(path)


@pytest.mark.parametrize("named", [True, False])
def test_a_category_name_that_is_used_twice(root, named):
    """The JSON is to blame, not the YAML; and where one of the two is unused, the id is that of the other."""
    path = describe(root, "coco", **({} if named else {"names": None}))

    def twice(content: dict) -> None:
        content["categories"].append({"id": 90, "name": "dog"})
        content["annotations"][1]["category_id"] = 90

    before = (root / "instances.json").read_text()
    edit_json(root, twice)
    text = f"{root / 'instances.json'}: categories: 'dog' is the name of the ids 20 and 90; rename one"
    with pytest.raises(UserError, match=re.escape(text)):
        load(path)
    (root / "instances.json").write_text(before)
    for unused in (5, 90):
        content = json.loads(before)
        content["categories"].append({"id": unused, "name": "dog"})
        (root / "instances.json").write_text(json.dumps(content))
        if named:
            assert load(path).ground_truth().category_ids == (10, 20)


def test_names_of_categories_have_no_outer_spaces(root):
    """YAML removes the outer spaces of its names, so they could not be equal otherwise."""
    edit_json(root, lambda content: content["categories"][0].update(name=" cat\t"))
    for names in (list(NAMES), None):
        index = load(describe(root, "coco", names=names))
        assert index.names == NAMES
        assert index.report.problems == 0
    edit_json(root, lambda content: content["categories"][0].update(name=" "))
    with pytest.raises(UserError, match=re.escape('categories[0]: name " " is empty; give the category a name')):
        load(describe(root, "coco"))


REVERSED = {
    "voc": lambda rows: [(c, x2, y1, x1, y2) for c, x1, y1, x2, y2 in rows],
    "coco": lambda rows: [(c, x2, y2, x1, y1) for c, x1, y1, x2, y2 in rows],
    "yolo": lambda rows: [(c, x2, y2, x1, y1) for c, x1, y1, x2, y2 in rows],
}


@EACH_FORMAT
@pytest.mark.parametrize("count", [5, 20])
def test_corners_in_the_wrong_order_and_negative_sizes_are_read(root, caplog, reader, count):
    path = describe(root, reader)
    before = load(path)
    for name in IMAGES[:count]:
        edit_rows(root, name, REVERSED[reader])
    caplog.set_level(logging.INFO, "lockstep")
    for _ in range(2):
        caplog.clear()
        after = load(path)
        (said,) = (text for text in caplog.messages if "wrong order" in text and "boxes with" in text)
        start = "train: boxes with corners in the wrong order, or negative sides, which are used: "
        assert said.startswith(f"{start}{2 * count}, first ")
    assert after.report.ledger.losses == ()
    np.testing.assert_allclose(after.boxes_xywh_px, before.boxes_xywh_px)
    np.testing.assert_allclose(after.area_px, before.area_px)


@EACH_FORMAT
def test_boxes_in_another_notation_are_lost_where_they_do_not_fit(root, reader):
    """Corners in place of sizes, or sizes in place of corners: those that fit do so by chance."""

    def rewritten(rows: list) -> list:
        if reader == "voc":
            return [(c, x1, y1, x2 - x1, y2 - y1) for c, x1, y1, x2, y2 in rows]
        if reader == "coco":
            return [(c, x1, y1, x1 + x2, y1 + y2) for c, x1, y1, x2, y2 in rows]
        return [(c, x1 - x2 / 2, y1 - y2 / 2, x1 + x2 / 2, y1 + y2 / 2) for c, x1, y1, x2, y2 in rows]

    path = describe(root, reader)
    for name in IMAGES:
        edit_rows(root, name, rewritten)
    with pytest.raises(UserError, match=r"labeled objects can't be used.* boxes do not fit into their images as .* as"):
        load(path)


def test_a_box_of_voc_outside_of_an_object_is_a_lost_row(root):
    path = describe(root, "voc")
    for name in IMAGES[:5]:
        file = root / "voc" / name.replace(".png", ".xml")
        file.write_text(file.read_text().replace("<object>", "<Object>").replace("</object>", "</Object>"))
    with pytest.raises(UserError, match=r"5 of 20 images.*<Object> with a box where VOC has <object>"):
        load(path)


@EACH_FORMAT
def test_boxes_far_beyond_their_images_are_lost(root, reader):
    """Such labels belong to a larger image, whose size they do not state."""
    path = describe(root, reader)
    edit_json(root, entries("images", lambda entry: entry.pop("width")))
    for name in IMAGES:
        edit_rows(root, name, lambda rows: [(c, 1.4 * x1, y1, 1.4 * x2, 1.3 * y2) for c, x1, y1, x2, y2 in rows])
    with pytest.raises(UserError, match="20 of 40 boxes exceed their images by more than 10% of a side"):
        load(path)


@pytest.mark.parametrize("reader", ["voc", "coco"])
def test_boxes_as_fractions_where_pixels_are_expected_are_named(root, reader):
    path = describe(root, reader)
    for name in IMAGES[:7]:
        edit_rows(root, name, lambda rows: [(c, x1 / 80, y1 / 60, x2 / 80, y2 / 60) for c, x1, y1, x2, y2 in rows])
    with pytest.raises(UserError, match="the boxes are fractions of the image, expected pixels"):
        load(path)
    assert len(load(path, max_bad=0.5)) == 13
    for name in IMAGES:
        edit_rows(root, name, lambda _: [(0, 0, 0, 1, 1)])  # whole images
    with pytest.raises(UserError, match="the boxes are fractions of the image, expected pixels"):
        load(path)


def polygon(points: list[tuple[float, float]]) -> str:
    return "0 " + " ".join(f"{x} {y}" for x, y in points) + "\n"


def test_different_polygons_of_one_box_are_two_objects(root):
    low, high = (0.2, 0.2), (0.6, 0.7)
    triangles = [polygon([low, (0.6, 0.2), high]), polygon([low, (0.2, 0.7), high])]  # of one area, too
    box = polygon([low, (0.6, 0.2), high, (0.2, 0.7)])
    (root / "labels/train/00.txt").write_text("".join(triangles))
    (root / "labels/train/01.txt").write_text(triangles[0] * 2 + box * 2)
    index = load(describe(root, "yolo"), repeats=True)
    assert index.repeated[:6].tolist() == [False, False, False, True, False, True]
    segmentations = [[[16, 12, 48, 12, 48, 42]], [[16, 12, 16, 42, 48, 42]], [[16, 12, 16, 42, 48, 42]]]
    object_of_both = {"image_id": 100, "category_id": 10, "bbox": [16, 12, 32, 30], "area": 480}
    extra = [object_of_both | {"id": 900 + i, "segmentation": each} for i, each in enumerate(segmentations)]
    edit_json(root, lambda content: content["annotations"].extend(extra))
    index = load(describe(root, "coco"))
    assert index.repeated.sum() == 1
    odd = [[[1, 2], [3, 4]]], [{}], [], "", {"counts": [1, 2], "size": [60, 80]}, [[None] * 8]
    extra = [object_of_both | {"id": 910 + i, "segmentation": each} for i, each in enumerate(odd)]
    edit_json(root, lambda content: content["annotations"].extend(extra))
    assert load(describe(root, "coco")).repeated.sum() == 1 + len(odd) - 1  # they are boxes


def test_lost_labels_from_one_percent_on_are_warned_of(root, caplog):
    path = describe(root, "yolo")
    many = "".join(f"0 0.5 {0.1 + i / 1000} 0.2 0.1\n" for i in range(180))
    edit_rows(root, IMAGES[0], unknown_class)
    for _ in range(2):
        caplog.clear()
        index = load(path)
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        reason = "unknown class: labels/train/00.txt:2: class 7 is not among the classes (0 to 1)"
        assert warned == [f"train: 1 of 40 labeled objects can't be used and are left out: {reason}"]
    assert index.report.ledger.share == 1 / 40
    (root / "labels/train/01.txt").write_text(many)
    caplog.clear()
    load(path)
    assert [record for record in caplog.records if record.levelno == logging.WARNING] == []


@EACH_FORMAT
def test_many_images_labeled_without_objects_are_asked_about(root, caplog, reader):
    caplog.set_level(logging.INFO, "lockstep")
    path = describe(root, reader)
    for count in (10, 15):
        for name in IMAGES[:count]:
            edit_rows(root, name, lambda _: [])
        caplog.clear()
        load(path)
        hint = [text for text in caplog.messages if "have no object" in text]
        assert len(hint) == (count == 15)
    assert hint[0].startswith("train: 15 of 20 labeled images have no objects: an empty label file, or no annotations")


def lose_half(root: Path) -> None:
    """Every second object of all formats has a class without a name."""
    for name in IMAGES:
        edit_rows(root, name, unknown_class)


VIEWS = {
    "classes": ({"classes": {"cat": "animal", "dog": "animal"}}, {}, lambda spec: spec),
    "ignore": ({"ignore": ["dog"]}, {}, lambda spec: spec),
    "--classes": ({}, {}, lambda spec: spec.use_classes(["cat"])),
    "--fraction": ({}, {"fraction": 0.2}, lambda spec: spec),
    "--val-fraction": ({}, {}, lambda spec: spec.hold_out([f"images/train/{name}" for name in IMAGES[:4]])),
    "tile": ({"tile": 32}, {}, lambda spec: spec),
    "without repeats": ({}, {"repeats": False}, lambda spec: spec),
}


@EACH_FORMAT
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_a_split_is_judged_by_all_of_its_labels(root, reader, view):
    content, options, change = VIEWS[view]
    path = describe(root, reader, **content)
    load(path, change=change, **options)
    lose_half(root)
    for split in ("train", "val"):
        for _ in range(2):
            with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
                load(path, split, change, **options)
    assert len(load(path, change=change, max_bad=0.6, **options))


@EACH_FORMAT
def test_single_cls_takes_all_classes_and_loses_other_rows(root, reader):
    path = describe(root, reader)
    lose_half(root)
    index = load(path, single_cls=True)  # which need no names
    assert len(index.classes) == 40
    assert index.report.ledger.losses == ()
    for name in IMAGES:
        edit_rows(root, name, one_good_row_of_ten)
    with pytest.raises(UserError, match="180 of 200 labeled objects can't be used"):
        load(path, single_cls=True)


@EACH_FORMAT
def test_ignored_classes_do_not_count_as_lost(root, caplog, reader):
    path = describe(root, reader, ignore=["dog"])
    for change in (lambda spec: spec, lambda spec: spec.use_classes(["cat"])):
        index = load(path, change=change)
        assert index.report.ledger.losses == ()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@EACH_FORMAT
def test_an_image_with_lost_rows_is_no_background_for_chosen_classes(root, reader):
    """Its lost row may be one of the class."""
    path = describe(root, reader)
    edit_rows(root, IMAGES[0], lambda rows: [(7, *rows[0][1:]), rows[1]])  # its only dog is left
    edit_rows(root, IMAGES[1], lambda rows: rows[1:])
    whole = load(path)
    cats = load(path, change=lambda spec: spec.use_classes(["cat"]))
    assert list(cats.paths) == [f"images/train/{name}" for name in IMAGES[1:]]
    assert cats.report.totals["backgrounds"] == 1
    assert list(whole.paths) == [f"images/train/{name}" for name in IMAGES]
    assert len(load(path, change=lambda spec: spec.use_classes(["dog"]))) == 20
    assert len(load(describe(root, reader, ignore=["dog"]))) == 19


@EACH_FORMAT
def test_a_part_of_a_joined_set_is_judged_by_itself(root, tmp_path, reader):
    path = describe(root, reader)
    other = tmp_path / "other"
    rows = {f"{i:03}.png": [(0, 5, 10, 30, 40)] for i in range(200)}
    write_three_formats(other, NAMES, dict.fromkeys(rows, (HEIGHT, WIDTH)), rows)
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump({"train": [str(describe(other, reader)), str(path)]}))
    assert len(load(both)) == 220
    lose_half(root)
    with pytest.raises(UserError, match=re.escape(f"{path}: 'train': 20 of 40 labeled objects can't be used")):
        load(both)
    ledger = load(both, max_bad=0.6).report.ledger
    assert (ledger.used_images, ledger.used_objects, ledger.lost_objects) == (220, 220, 20)


@EACH_FORMAT
def test_what_was_labeled_is_judged_before_a_part_of_it_is_chosen(root, caplog, reader):
    path = describe(root, reader)
    without_area_of_dogs(root)
    chosen = {
        "fraction": lambda: load(path, fraction=0.3),
        "classes": lambda: load(path, change=lambda spec: spec.use_classes(["dog"])),
        "held out": lambda: load(path, "val", change=lambda spec: spec.hold_out(["of another data set"])),
    }
    with caplog.at_level(logging.INFO, "lockstep"):
        for choose in chosen.values():
            with pytest.raises(UserError, match="'train': 20 of 40 labeled objects can't be used"):
                choose()
    assert not [line for line in caplog.messages if not line.startswith("scanning")]


@EACH_FORMAT
def test_shards_keep_the_ledger(root, tmp_path, reader):
    spec = load_dataset_spec(describe(root, reader))
    for name in IMAGES[:4]:
        edit_rows(root, name, unknown_class)
    write_set(spec, tmp_path / "whole", 10**9)
    assert load(tmp_path / "whole/data.yaml").report.ledger.lost_objects == 4
    assert load(tmp_path / "whole/data.yaml").incomplete.sum() == 4
    lose_half(root)
    with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
        write_set(spec, tmp_path / "half", 10**9)
    write_set(spec, tmp_path / "half", 10**9, max_bad=0.6)
    with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
        load(tmp_path / "half/data.yaml")
    assert len(load(tmp_path / "half/data.yaml", max_bad=0.6)) == 20


@EACH_FORMAT
def test_a_staged_copy_is_judged_like_its_original(root, tmp_path, reader):
    path = describe(root, reader)
    source = DataSource(str(path), ("train", "val"), stage=str(tmp_path / "stage"))
    assert len(load_index(open_data(source, DistributedContext.single()), "train", IndexSettings(progress=False))) == 20
    lose_half(root)
    spec = open_data(source, DistributedContext.single())
    with pytest.raises(UserError, match="20 of 40 labeled objects can't be used"):
        load_index(spec, "train", IndexSettings(progress=False))


def test_rows_of_lists_that_are_no_images_are_counted_also_in_a_staged_copy(root, tmp_path):
    path = describe(root, "yolo", train="list.txt")
    rows = ["# the images", '"images/train/00.png"', "images/train/01.png 0 1", "images/train/gone.png"]
    rows += [f"images/train/{name}" for name in IMAGES[4:]]
    (root / "list.txt").write_text("\n".join(rows))
    spec = load_dataset_spec(path)
    staged = open_data(DataSource(str(path), ("train",), stage=str(tmp_path / "stage")), DistributedContext.single())
    for each in (spec, staged):
        with pytest.raises(UserError, match="4 of 20 images can't be used") as refused:
            load_index(each, "train", IndexSettings(progress=False))
        assert "bad row of a list: 3 images, first list.txt:1: '# the images' is not the path" in str(refused.value)
    index = load_index(spec, "train", IndexSettings(progress=False, max_bad=0.2))
    assert len(index) == 16


def test_tiles_of_an_image_with_lost_rows_are_no_backgrounds(tmp_path):
    root = tmp_path / "large"
    rows = {f"{i}.png": [(0, 5, 5, 30, 30)] for i in range(2)}
    write_three_formats(root, NAMES, dict.fromkeys(rows, (128, 128)), rows)
    path = describe(root, "yolo", tile=64)
    with open(root / "labels/train/0.txt", "a") as file:
        file.write("7 0.8 0.8 0.1 0.1\n")
    tiles = TiledIndex(load(path, max_bad=0.5), 64, hyp=Hyperparameters())
    weights = tile_weights(tiles, 1.0)
    has_object = np.bincount(tiles.tile_index.image_of_box, minlength=len(tiles.tile_index)) > 0
    assert weights[has_object].tolist() == [1.0, 1.0]
    assert (weights[~has_object & (tiles.image == 0)] == 0).all()
    assert (weights[~has_object & (tiles.image == 1)] > 0).all()


def flags(path: Path, tmp_path: Path) -> list[object]:
    return ["--data", path, *SMALL, "--project", tmp_path / "runs", "--cache-dir", tmp_path / "cache"]


def test_every_command_gives_the_same_refusal(root, tmp_path, capsys):
    path = describe(root, "coco")
    edit_json(root, annotations(lambda a, position: position % 4 < 2 and a.update(image_id=7)))
    cause = "20 of 40 labeled objects can't be used (--max-bad is 0.1): annotation without an image: 20 objects, "
    model = write_model(tmp_path / "tiny.yaml")
    weights = write_weights(tmp_path / "w.pt", NAMES)
    trained = [*flags(path, tmp_path), "--model", model, "--epochs", 1]
    said = error_of(capsys, train.main, *trained)
    assert f"error: {path}: 'train': {cause}" in said
    assert f"error: {path}: 'train': {cause}" in error_of(capsys, kfold, *trained, "--folds", 2)
    scored = ["--weights", weights, "--data", path, *PLAIN, "--project", tmp_path / "runs"]
    assert f"error: {path}: 'val': {cause}" in error_of(capsys, val.main, *scored)
    with pytest.raises(SystemExit) as ended:
        call(check, path, "--noplots", "--split", "train")
    assert ended.value.code == 1
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert cause in warned[0]


def test_one_cause_is_one_warning_of_a_check(root, capsys):
    path = describe(root, "yolo")
    for label in (root / "labels/train").iterdir():
        label.unlink()
    with pytest.raises(SystemExit):
        call(check, path, "--noplots", "--split", "train")
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert "has 20 images and no label file" in warned[0]


@pytest.mark.parametrize("used", [False, True])
def test_a_background_class_is_named_before_training(root, caplog, used):
    path = describe(root, "yolo", names=["cat", "dog", "__Background__"])
    if used:
        edit_rows(root, IMAGES[0], lambda rows: [*rows, (2, 0, 0, 80, 60)])
    load(path, "val")
    assert caplog.messages == []
    load(path)
    (said,) = caplog.messages
    assert f"'__Background__' is one of the classes, with {'1 box' if used else '0 boxes'}: " in said
    assert ("its boxes are learned as objects" if used else "'ignore: [__Background__]'") in said
    if not used:
        assert load(describe(root, "yolo", names=["cat", "dog", "Background"], ignore=["Background"])).names == NAMES


def without_area_of_dogs(root: Path) -> None:
    """Half of the objects of all formats have no area: they are lost whatever classes are used."""
    for name in IMAGES:
        edit_rows(root, name, lambda rows: [rows[0], (1, 45, 20, 45, 35)])


def one_yaml(reader: str, **content: object) -> Callable[[Path], Path]:
    return lambda root: describe(root, reader, **content)


def as_shards(root: Path) -> Path:
    write_set(load_dataset_spec(describe(root, "yolo")), root / "shards", 10**9, max_bad=0.6)
    return root / "shards/data.yaml"


def as_joined(root: Path) -> Path:
    part = describe(root, "coco")
    path = root / "joined.yaml"
    path.write_text(yaml.safe_dump({"train": [part.name], "val": [part.name]}))
    return path


def as_lists(root: Path) -> Path:
    (root / "all.txt").write_text("".join(f"images/train/{name}\n" for name in IMAGES))
    return describe(root, "yolo", train="all.txt", val="all.txt")


# How the data set is described, and flags of training. All lose the same objects.
READERS = {
    "YOLO": (one_yaml("yolo"), []),
    "COCO": (one_yaml("coco"), []),
    "VOC": (one_yaml("voc"), []),
    "lists": (as_lists, []),
    "shards": (as_shards, []),
    "joined": (as_joined, []),
    "tiles": (one_yaml("yolo", tile=32), []),
    "classes:": (one_yaml("voc", classes={"cat": "animal", "dog": "animal"}), []),
    "ignore:": (one_yaml("coco", ignore=["dog"]), []),
    "staging": (one_yaml("coco"), ["--stage", "stage"]),
    "--single-cls": (one_yaml("voc"), ["--single-cls"]),
    "--classes": (one_yaml("yolo"), ["--classes", "cat"]),
    "--fraction": (one_yaml("coco"), ["--fraction", 0.3]),
    "--val-fraction": (one_yaml("yolo", val=None), ["--val-fraction", 0.3]),
}
HALF = "20 of 40 labeled objects can't be used (--max-bad is 0.1): box without area: 20 objects, first "


@pytest.fixture
def half_lost(root, tmp_path, monkeypatch) -> Path:
    without_area_of_dogs(root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


@pytest.mark.parametrize("reader", READERS)
def test_train_gives_the_same_refusal_for_each_reader_and_view(half_lost, tmp_path, capsys, reader):
    write, more = READERS[reader]
    trained = [*flags(write(half_lost), tmp_path), "--model", write_model(tmp_path / "tiny.yaml"), "--epochs", 1]
    assert f"'train': {HALF}" in error_of(capsys, train.main, *trained, *more)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("reader", [name for name, (_, more) in READERS.items() if not more])
def test_val_gives_the_same_refusal_for_each_reader(half_lost, tmp_path, capsys, reader):
    path = READERS[reader][0](half_lost)
    names = ("animal",) if reader == "classes:" else ("cat",) if reader == "ignore:" else NAMES
    weights = write_weights(tmp_path / "w.pt", names)
    assert f"'val': {HALF}" in error_of(capsys, val.main, "--weights", weights, "--data", path, *PLAIN)


@pytest.mark.parametrize("reader", ["YOLO", "COCO", "VOC", "lists", "joined", "tiles", "classes:", "ignore:"])
def test_check_and_shard_give_the_same_verdict_for_each_reader(half_lost, tmp_path, capsys, reader):
    path = READERS[reader][0](half_lost)
    with pytest.raises(SystemExit) as ended:
        call(check, path, "--noplots", "--split", "train")
    assert ended.value.code == 1
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len([line for line in warned if HALF in line]) == 1
    assert f"'train': {HALF}" in error_of(capsys, shard, path, tmp_path / "out")


@pytest.mark.parametrize("reader", ["YOLO", "COCO", "VOC", "--single-cls", "--classes"])
def test_folds_give_the_same_refusal(half_lost, tmp_path, capsys, reader):
    write, more = READERS[reader]
    trained = [*flags(write(half_lost), tmp_path), "--model", write_model(tmp_path / "tiny.yaml"), "--epochs", 1]
    assert f"'train': {HALF}" in error_of(capsys, kfold, *trained, "--folds", 2, *more)


def test_a_search_gives_the_same_refusal(half_lost, tmp_path, capsys):
    pytest.importorskip("optuna")
    path = describe(half_lost, "yolo")
    trained = [*flags(path, tmp_path), "--model", write_model(tmp_path / "tiny.yaml"), "--epochs", 1]
    (tmp_path / "ranges.yaml").write_text("lr0: [0.001, 0.1]\n")
    said = error_of(capsys, search, *trained, "--hyp", tmp_path / "ranges.yaml", "--trials", 2, "--folds", 2)
    assert f"'train': {HALF}" in said


def test_python_gives_the_same_refusal(half_lost, tmp_path):
    """The command runs in a process of its own, like those of the other functions."""
    path = describe(half_lost, "coco")
    settings = {"epochs": 1, "imgsz": 64, "device": "cpu", "workers": 0, "noplots": True}
    with pytest.raises(lockstep.Error, match=re.escape(f"'train': {HALF}")):
        lockstep.train(str(path), model=str(write_model(tmp_path / "tiny.yaml")), **settings)
