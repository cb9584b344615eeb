"""Of labels for several splits, what cannot be used is lost in one of them; those of unnamed images are not lost."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path

import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import IMAGE_ELSEWHERE
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.open import open_data
from tests.data.max_bad.twenty_images import (
    IMAGES,
    change_entries,
    edit_json,
    edit_rows,
    load,
    move_half_to_folder,
    write_yaml,
)
from tests.helpers.three_formats import write_image
from utils.distributed.context import DistributedContext
from utils.errors import UserError


def test_annotated_images_that_the_split_does_not_have_are_counted(root):
    path = write_yaml(root, "coco")

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
    path = write_yaml(
        root, "coco", annotations={"train": "instances.json", "val": "instances.json" if apart else "others.json"}
    )
    message = f"instances.json doesn't name {count} of 20 images, which are left out, first images/train/00.png"
    for _ in range(2):  # scanned and cached
        caplog.clear()
        with caplog.at_level(logging.INFO, "lockstep"):
            index = load(path)
        assert len(index) == 20 - count
        assert index.report.ledger.losses == ()
        records = [record for record in caplog.records if "doesn't name" in record.message]
        assert [record.levelno for record in records] == ([level] if level else [])
        assert all(message in record.message for record in records)


def test_advice_from_the_cache_is_that_of_a_scan_after_another_split_has_changed(root):
    """The images that a JSON does not name may be those of another split."""
    whole = (root / "instances.json").read_text()
    (root / "others.json").write_text(whole)
    edit_json(root, lambda content: content.update(images=content["images"][:5], annotations=[]))
    edit_json(root, lambda content: content.update(annotations=json.loads(whole)["annotations"][:2]))
    counts = []
    for val_file in ("others.json", "instances.json", "others.json"):
        path = write_yaml(root, "coco", annotations={"train": "instances.json", "val": val_file})
        report = load(path, max_bad=1.0).report
        counts.append((len(report.advice), len(report.notes)))
    assert counts[0] == counts[2]
    assert counts[1][0] == counts[0][0] + 1


ONE_FILE = pytest.mark.parametrize("reader", ["coco", "voc"])


def in_lists(root: Path, reader: str) -> Path:
    """The lists name eight images of each split."""
    for split, names in (("train", IMAGES[:8]), ("val", IMAGES[8:16])):
        (root / f"{split}.txt").write_text("".join(f"images/train/{name}\n" for name in names))
    return write_yaml(root, reader, train="train.txt", val="val.txt")


@ONE_FILE
@pytest.mark.parametrize("choose", [move_half_to_folder, in_lists])
def test_labels_of_images_that_no_split_names_are_not_lost(root, tmp_path, reader, choose):
    """In YOLO txt, the files of other images are in other folders. Here the user has chosen the images."""
    path = choose(root, reader)
    staged = open_data(DataSource(str(path), ("train",), stage=str(tmp_path / "stage")), DistributedContext.single())
    for spec in (load_dataset_spec(path), staged):
        index = load_index(spec, "train", IndexSettings(progress=False, workers=0))
        assert len(index) in (8, 10)
        assert index.report.ledger.losses == ()
        is_doubtful = (
            reader == "coco" and choose is move_half_to_folder
        )  # bare file names may be those of deleted images, too
        assert [finding.kind for finding in index.report.findings] == [IMAGE_ELSEWHERE] * (10 * is_doubtful)


@pytest.mark.parametrize("reader", ["yolo", "coco"])
def test_a_hidden_image_is_named(root, caplog, reader):
    path = write_yaml(root, reader)
    (root / "images/train/00.png").rename(root / "images/train/.00.png")
    (root / "labels/train/00.txt").rename(root / "labels/train/.00.txt")
    (root / "images/train/._01.png").write_bytes(b"the resource fork of macOS")
    assert len(load(path)) == 19
    (message,) = [line for line in caplog.messages if "1 file left out" in line]
    assert message.endswith("first images/train/.00.png: is hidden because its name begins with a dot; rename it")


def in_two_lists(root: Path) -> Path:
    """Sixteen images are for training; a row of the list names the one that is missing."""
    for split, names in (("train", IMAGES[:16]), ("val", IMAGES[16:])):
        (root / f"{split}.txt").write_text("".join(f"images/train/{name}\n" for name in names))
    return write_yaml(root, "coco", train="train.txt", val="val.txt")


def in_two_folders(root: Path) -> Path:
    (root / "images/val").mkdir()
    for name in IMAGES[16:]:
        (root / "images/train" / name).rename(root / "images/val" / name)
    return write_yaml(root, "coco", val="images/val")


def in_named_folders(root: Path) -> Path:
    """The JSON names images with their folders, and the missing one in that of the second split."""
    path = in_two_folders(root)
    position = {name: i for i, name in enumerate(IMAGES)}
    folders = change_entries(
        "images", lambda e: e.update(file_name=f"{'train' if position[e['file_name']] > 3 else 'val'}/")
    )
    names = [entry["file_name"] for entry in json.loads((root / "instances.json").read_text())["images"]]
    edit_json(root, folders)
    edit_json(root, lambda content: [e.update(file_name=e["file_name"] + n) for e, n in zip(content["images"], names)])
    return path


@pytest.mark.parametrize(
    ("divide", "train", "val"),
    [(in_two_lists, (15, 2), (4, 0)), (in_two_folders, (15, 2), (4, 0)), (in_named_folders, (15, 0), (4, 2))],
)
def test_an_image_that_is_missing_from_one_split_is_not_lost_in_all(root, tmp_path, divide, train, val):
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
    path = write_yaml(root, "coco", val="images/val", test="images/test")
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
    path = write_yaml(root, "coco", val="images/val", test="images/test")
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
    path = write_yaml(root, "coco", val="images/val")
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
