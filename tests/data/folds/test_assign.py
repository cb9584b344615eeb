"""Folds: whole groups, every class spread evenly, the same for the same seed."""

from __future__ import annotations

import csv
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.folds.assign import assign_folds, class_counts, rare_classes
from data.folds.groups import groups_of
from data.folds.held_out import hold_out_validation, scan_settings, validation_images
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.open_reader import open_val_index
from data.source.dataset_yaml import load_dataset_spec
from engine.evaluation.metrics import Fitness
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset
from tools.kfold.folds import joined_index, make_folds
from tools.kfold.write_folds import data_of, write_folds
from utils.config.search_settings import KfoldConfig
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext


def random_groups(seed: int, images: int = 300, groups: int = 90, classes: int = 6):
    """Groups of 1 to many images, and classes from frequent to rare."""
    rng = np.random.default_rng(seed)
    group = np.unique(np.r_[np.arange(groups), rng.integers(0, groups, images - groups)], return_inverse=True)[1]
    rates = 3.0 / 2 ** np.arange(classes)
    return rng.permutation(group), rng.poisson(rates, (images, classes))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("folds", [2, 5])
def test_groups_stay_together_and_classes_are_spread(seed, folds):
    group, counts = random_groups(seed)
    fold = assign_folds(group, counts, folds, seed)
    assert set(fold) == set(range(folds))
    for number in range(group.max() + 1):
        assert len(set(fold[group == number])) == 1
    by_group = np.zeros((group.max() + 1, counts.shape[1]), int)
    np.add.at(by_group, group, counts)
    of_fold = np.stack([counts[fold == k].sum(0) for k in range(folds)])
    # No fold differs from an even share by more than the boxes of this class in the largest group, and a few more.
    assert (np.abs(of_fold - counts.sum(0) / folds) <= by_group.max(0) + 3).all(), of_fold
    images = np.bincount(fold)
    assert np.abs(images - len(group) / folds).max() <= 0.25 * len(group) / folds


def test_it_is_more_even_than_chance():
    group, counts = random_groups(1)

    def spread(fold):
        return np.stack([counts[fold == k].sum(0) for k in range(5)]).std(0) / counts.sum(0)

    chance = [spread(np.random.default_rng(s).permutation(np.arange(90) % 5)[group]) for s in range(20)]
    found = spread(assign_folds(group, counts, 5, 0))
    assert (found <= np.mean(chance, 0)).all()
    assert found.sum() <= np.mean(chance, 0).sum() / 3


def test_a_seed_decides_the_folds_and_every_fold_gets_a_group():
    """In one of the sets, all boxes are in two images."""
    group, counts = random_groups(2)
    first, again, other = (assign_folds(group, counts, 3, seed) for seed in (4, 4, 5))
    assert (first == again).all()
    assert (first != other).any()
    counts = np.zeros((20, 2), int)
    counts[:3, 0] = 1
    fold = assign_folds(np.arange(20), counts, 4, 0)
    assert np.bincount(fold).tolist() == [5, 5, 5, 5]  # images without boxes fill them up
    assert len(set(fold[:3])) == 3
    counts = np.array([[9], [9], [0], [0]])
    assert sorted(assign_folds(np.arange(4), counts, 4, 0)) == [0, 1, 2, 3]
    with refused("--folds 3: the images form only 2 groups; use fewer folds"):
        assign_folds(np.array([0, 1, 1]), counts[:3], 3, 0)


@pytest.fixture
def config(tmp_path):
    data = write_dataset(tmp_path / "set", train=12, val=6)
    return KfoldConfig(data=str(data), cache_dir=str(tmp_path / "cache"), folds=3, workers=0)


def index_of(config):
    return joined_index(load_dataset_spec(config.data), config)


def transfer(how, old: str, new: str) -> None:
    """Copies or moves an image with its labels."""
    how(old, new)
    how(label_of(old), label_of(new))


def test_the_joined_index_has_each_image_once_with_its_labels(config, tmp_path):
    spec = load_dataset_spec(config.data)
    joined = joined_index(spec, config)
    assert len(joined) == 18
    parts = [load_index(spec, split, IndexSettings(cache_dir=config.cache_dir)) for split in ("train", "val")]
    rows = {index.path(i): index.labels(i) for index in parts for i in range(len(index))}
    for i in range(len(joined)):
        np.testing.assert_array_equal(joined.labels(i), rows[joined.path(i)])
    both = tmp_path / "both.yaml"
    root = tmp_path / "set"
    both.write_text(f"path: {root}\ntrain: [images/train, images/val]\nval: images/val\nnames: [light, dark]\n")
    again = joined_index(load_dataset_spec(both), config)
    assert sorted(again.paths) == sorted(joined.paths)
    assert class_counts(again).sum(0).tolist() == class_counts(joined).sum(0).tolist()


def test_groups_from_names_files_and_near_duplicates(config, tmp_path):
    index = index_of(config)
    assert len(set(groups_of(index, "", False))) == 18
    assert len(set(groups_of(index, r"(\d)\.png", False))) == 10
    table = tmp_path / "groups.csv"
    table.write_text("image,group\n" + "".join(f"{path},{i % 4}\n" for i, path in enumerate(index.paths)))
    assert (groups_of(index, str(table), False) == np.arange(18) % 4).all()
    copy = index.path(3)
    twin = copy.replace("003", "020")
    transfer(shutil.copy, copy, twin)
    more = index_of(config)
    group = groups_of(more, "", True)
    paths = [more.path(i) for i in range(len(more))]
    assert group[paths.index(copy)] == group[paths.index(twin)]
    assert len(set(group)) == 18
    for name in (copy, index.path(7)):  # named as Roboflow names its copies of one image
        transfer(shutil.move, name, str(Path(name).with_name(f"a_jpg.rf.{Path(name).stem}.png")))
    more = index_of(config)
    assert len(set(groups_of(more, "", True))) == 17
    assert len(set(groups_of(more, "", False))) == 19


@pytest.mark.parametrize("workers", [-1, 0, 1])
def test_a_split_that_is_divided_is_scanned_like_any_other(tmp_path, monkeypatch, workers):
    """At least one thread per core scans, even if the loader has no worker processes."""
    used = []

    def map_and_record(function, items, *, threads: int):
        used.append(threads)
        return map(function, items)

    monkeypatch.setattr("data.index.read_images.map_ahead", map_and_record)
    data = write_dataset(tmp_path / "set", train=2, val=2)
    config = TrainConfig(data=str(data), workers=workers, cache_dir=str(tmp_path / "cache"))
    spec = load_dataset_spec(data)
    load_index(spec, "train", scan_settings(config))
    open_val_index(DistributedContext.single(), config, spec, "val")
    assert used[0] == used[1]


@pytest.mark.parametrize(("fraction", "images"), [(0.1, 2), (0.25, 5), (0.5, 9), (0.05, 1)])
def test_a_part_of_each_class_is_held_out(config, fraction, images):
    index = index_of(config)
    names = validation_images(index, fraction)
    assert abs(len(names) - images) <= 1
    assert names == validation_images(index, fraction)
    taken = index.take(np.array([list(index.paths).index(name) for name in names]))
    assert list(taken.paths) == names
    counts = class_counts(taken).sum(0)
    of_all = class_counts(index).sum(0)
    assert (np.abs(counts - fraction * of_all) <= 3).all()


@pytest.mark.parametrize(("fraction", "level"), [(0.1, logging.WARNING), (0.4, logging.INFO)])
def test_a_share_far_from_the_one_asked_for_is_a_warning(tmp_path, caplog, fraction, level):
    """Two images allow only a half."""
    data = write_dataset(tmp_path / "set", train=2, val=1)
    data.write_text(data.read_text().replace("val: images/val", ""))
    config = TrainConfig(data=str(data), val_fraction=fraction, cache_dir=str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO, "lockstep"):
        hold_out_validation(DistributedContext.single(), config, load_dataset_spec(data), ())
    (record,) = [record for record in caplog.records if "--val-fraction" in record.message]
    assert record.levelno == level
    assert f"{fraction}: 1 of 2 training images" in record.message
    assert ("(50 %): near-duplicates" in record.message) == (level == logging.WARNING)


def test_whole_groups_are_held_out(config):
    index = index_of(config)
    for number in range(6):  # six images of three copies
        old = index.path(number)
        for copy in range(3):
            transfer(shutil.copy if copy < 2 else shutil.move, old, old.replace(".png", f"_png.rf.{copy}.png"))
    index = index_of(config)
    names = {name.partition("_png.rf.")[0] for name in validation_images(index, 0.4) if ".rf." in name}
    assert names
    assert sum(name.startswith(f"{stem}_png.rf.") for stem in names for name in index.paths) == 3 * len(names)
    one = index.take(np.flatnonzero([next(iter(names)) in name for name in index.paths]))
    with refused(
        "--val-fraction: 3 training images: near-duplicates and copies stay together, so none can be held out"
    ):
        validation_images(one, 0.2)
    assert len(validation_images(index.take(np.array([0, 17])), 0.05)) == 1  # of two groups
    with refused("--val-fraction: 1 training image: near-duplicates and copies stay together, so none can be held out"):
        validation_images(index.take(np.array([0])), 0.2)


def test_a_table_of_folds_tells_the_groups_again(config, tmp_path):
    """The paths of some images would be formulas in a spreadsheet."""
    (tmp_path / "set" / "images" / "train").rename(tmp_path / "set" / "=train")
    shutil.copytree(tmp_path / "set" / "labels" / "train", tmp_path / "set" / "=train", dirs_exist_ok=True)
    data = Path(config.data)
    data.write_text(data.read_text().replace("images/train", "=train"))
    index = joined_index(load_dataset_spec(data), config)
    group = np.arange(len(index)) % 5
    write_folds(tmp_path, load_dataset_spec(data), index, group=group, fold=group % 3)
    assert "'=train/000.png" in (tmp_path / "folds.csv").read_text()
    assert (groups_of(index, str(tmp_path / "folds.csv"), False) == group).all()


def label_of(image: str) -> str:
    return image.replace("images", "labels").replace(".png", ".txt")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("(", "--groups (: not a regular expression (missing ), unterminated subpattern at position 0)"),
        ("a{99999999999}", "--groups a{99999999999}: not a regular expression (the repetition number is too large)"),
        ("(" * 999 + ")" * 999, "not a regular expression (maximum recursion depth exceeded...)"),
        ("patient", "--groups patient: does not match 18 of 18 images, such as images/train/000.png"),
        ("no.csv", "no.csv: no such file"),
    ],
)
def test_groups_that_cannot_be_used(config, groups, message):
    with refused(message):
        groups_of(index_of(config), groups, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name,group\na.png,1\n", "groups.csv: the first line must name the columns image and group"),
        ("image,group\na.png,1\na.png,1\n./a.png,2\n", "groups.csv:4: a.png is in two groups, 1 and 2"),
        (f"image,group\na.png,{'1' * 200_000}\n", "groups.csv: not a CSV file (field larger than...)"),
        ("image,group\na.png,1\n", "groups.csv: has no group for 18 of 18 images, such as images/train/000.png ..."),
    ],
)
def test_files_of_groups_that_cannot_be_used(config, tmp_path, content, message):
    file = tmp_path / "groups.csv"
    file.write_text(content)
    with refused(message):
        groups_of(index_of(config), str(file), False)


def test_rare_classes_are_named(config):
    index = index_of(config)
    assert rare_classes(index, 2) == ""
    few = class_counts(index).sum(0)
    note = rare_classes(index, int(few.max()) + 1)
    assert note.startswith("2 classes with fewer boxes than there are folds")
    assert f"light ({few[0]})" in note


@pytest.mark.parametrize("layout", ["yolo", "coco"])
def test_the_lists_give_the_same_labels(config, tmp_path, layout):
    """The validation images of the folds are those of the data set, each once, also with labels in COCO's format."""
    spec = load_dataset_spec(config.data)
    if layout == "coco":
        spec = as_coco(spec, config, tmp_path)
    joined = joined_index(spec, replace(config, data=spec.source))
    fold = assign_folds(np.arange(len(joined)), class_counts(joined), 3, 0)
    folder = tmp_path / "lists"
    folder.mkdir()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    write_folds(folder, spec, joined, group=np.arange(len(joined)), fold=fold)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    seen = []
    for number in range(3):
        parts = {
            split: load_index(
                load_dataset_spec(data_of(folder, number)), split, IndexSettings(cache_dir=config.cache_dir)
            )
            for split in ("train", "val")
        }
        paths = {split: {part.path(i) for i in range(len(part))} for split, part in parts.items()}
        assert not paths["train"] & paths["val"]
        assert len(paths["train"] | paths["val"]) == len(joined)
        assert paths["val"] == {joined.path(i) for i in np.flatnonzero(fold == number)}
        labels = {joined.path(i): joined.labels(i) for i in range(len(joined))}
        for part in parts.values():
            for i in range(len(part)):
                np.testing.assert_allclose(part.labels(i), labels[part.path(i)], atol=1e-6)
        seen += paths["val"]
    assert len(seen) == len(set(seen)) == len(joined)
    with open(folder / "folds.csv", newline="") as file:
        assert [int(row["fold"]) - 1 for row in csv.DictReader(file)] == fold.tolist()


def test_the_lists_of_some_classes_have_the_labels_of_all(config, tmp_path):
    """The trainings of the folds select classes by number or name."""
    spec = as_coco(load_dataset_spec(config.data), config, tmp_path)
    config = replace(config, data=spec.source, classes=["1"], folds=2)
    folder = tmp_path / "lists"
    folder.mkdir()
    make_folds(config, spec.use_classes([1]), folder, Fitness.parse("AP", spec.names[1:]))
    joined = joined_index(spec, config)
    boxes = 0
    for split in ("train", "val"):
        part = load_index(load_dataset_spec(data_of(folder, 0)), split, IndexSettings(cache_dir=config.cache_dir))
        assert part.names == joined.names
        boxes += len(part.classes)
    assert boxes == len(joined.classes)


def as_coco(spec, config, tmp_path):
    """The same data set with labels in two COCO JSONs, and images of different names."""
    root = tmp_path / "coco"
    content = {"train": "images/train", "val": "images/val", "names": list(spec.names)}
    content["annotations"] = {"train": "train.json", "val": "val.json"}
    categories = [{"id": number + 7, "name": name} for number, name in enumerate(spec.names)]
    for split in ("train", "val"):
        index = load_index(spec, split, IndexSettings(cache_dir=config.cache_dir))
        (root / "images" / split).mkdir(parents=True)
        images = [{"id": i, "file_name": f"{split}{i}.png"} for i in range(len(index))]
        for i, image in enumerate(images):
            shutil.copy(index.path(i), root / "images" / split / image["file_name"])
        rows = zip(index.image_of_box.tolist(), index.classes.tolist(), index.boxes_xywh_px.tolist())
        boxes = [{"image_id": i, "category_id": c + 7, "bbox": box} for i, c, box in rows]
        annotation_file = {"images": images, "annotations": boxes, "categories": categories}
        (root / f"{split}.json").write_text(json.dumps(annotation_file))
    (root / "data.yaml").write_text(json.dumps(content))
    return load_dataset_spec(root / "data.yaml")
