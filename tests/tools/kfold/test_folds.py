"""The joined index of a cross-validation, and the lists of its folds."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.dataset.yaml_file import load_dataset_spec
from data.folds.assign import class_counts
from data.folds.groups import groups_of
from data.index.index import IndexSettings
from data.index.load import load_index
from engine.evaluation.fitness import Fitness
from tests.data.data_set import DataSet
from tests.data.folds.eighteen_images import write_eighteen_images
from tools.kfold.folds import data_of, joined_index, make_folds, write_folds
from utils.config.tool_settings import KfoldConfig


@pytest.fixture
def config(tmp_path: Path) -> KfoldConfig:
    return write_eighteen_images(tmp_path)


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


NAMES = ["a", "b"]
A = (0, 8, 8, 32, 24)
B = (1, 48, 8, 22, 24)
WITHOUT_AREA = (1, 20, 20, 0, 0)


def write_set(folder: Path) -> None:
    """Writes nine images of three groups, alternately. The second, the third and the fifth have lost a label, the last
    two of these have no b, and the last image is a background."""
    rows = [[A, B], [A, B, WITHOUT_AREA], [A, WITHOUT_AREA], [A, B], [A, WITHOUT_AREA], *[[A, B]] * 3, []]
    DataSet(folder).three_formats({f"{'xyz'[i % 3]}{i}": objects for i, objects in enumerate(rows)})


def labels_of(index) -> dict[str, tuple]:
    """Returns the labels of each image, and whether it has lost one, by its path."""
    return {
        str(Path(index.path(i)).resolve()): (index.labels(i).tolist(), bool(index.incomplete[i]))
        for i in range(len(index))
    }


@pytest.mark.parametrize("chosen", [{"classes": ["b"]}, {"ignore": ["a"]}])
@pytest.mark.parametrize("annotations", [{}, {"annotations": "voc"}, {"annotations": "all.json"}, "joined"])
def test_folds_have_the_images_and_groups_of_a_direct_training(tmp_path, annotations, chosen):
    write_set(tmp_path / "set")
    content = {"train": "images/train", "names": NAMES, "ignore": chosen.get("ignore", [])}
    if annotations == "joined":
        (tmp_path / "set/part.yaml").write_text(yaml.safe_dump({"train": "images/train", "names": NAMES}))
        del content["names"]
        content["train"] = ["part.yaml"]
    else:
        content |= annotations
    data = tmp_path / "set" / "data.yaml"
    data.write_text(yaml.safe_dump(content))
    classes = chosen.get("classes", [])
    cache = str(tmp_path / "cache")
    config = KfoldConfig(
        data=str(data),
        model="yolov8n",
        folds=3,
        groups=r"([xyz])\d",
        near_duplicates=False,
        max_bad=0.5,
        cache_dir=cache,
    )
    settings = IndexSettings(cache_dir=cache, progress=False)
    spec = load_dataset_spec(data).use_classes(classes)
    direct = labels_of(load_index(spec, "train", settings, max_bad=0.5))
    assert len(direct) == 7
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    make_folds(config, spec, tmp_path, Fitness.parse("AP", spec.names))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before
    with open(tmp_path / "folds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    letters = {(Path(row["image"]).name[0], row["group"], row["fold"]) for row in rows}
    assert len(letters) == 3, "the groups are divided"
    validated = {}
    for number in range(3):
        fold = load_dataset_spec(data_of(tmp_path, number)).use_classes(classes)
        train, val = (labels_of(load_index(fold, split, settings, max_bad=0.5)) for split in ("train", "val"))
        assert train | val == direct
        assert not train.keys() & val.keys()
        listed = {Path(row["image"]).name for row in rows if row["fold"] == str(number + 1)}
        assert {Path(path).name for path in val} == listed
        validated |= val
    assert validated == direct
