"""Folders without a YAML, as annotation tools write them, have the boxes of the set from which they were exported."""

from __future__ import annotations

import logging
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.folder_splits import split_of
from data.source.open import check_data, open_data
from tests.data.source.exported_folders import (
    EXPORTS,
    NAMES,
    ONE_SPLIT,
    boxes_of,
    coco_2017,
    copy_set,
    darknet,
    label_img,
    roboflow_coco,
    roboflow_voc,
)
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_image
from utils.distributed.context import DistributedContext
from utils.files import safe_io


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.__name__)
def test_it_has_the_boxes_of_its_source(export, source, tmp_path):
    export(source, tmp_path / "export")
    before = {path: path.read_bytes() for path in (tmp_path / "export").rglob("*") if path.is_file()}
    assert boxes_of(tmp_path / "export") == boxes_of(source / "data.yaml")
    assert {path: path.read_bytes() for path in (tmp_path / "export").rglob("*") if path.is_file()} == before
    assert set(load_dataset_spec(tmp_path / "export").names) == set(NAMES)


@pytest.mark.parametrize("export", ONE_SPLIT, ids=lambda e: e.__name__)
def test_without_splits_all_images_are_for_training(export, source, tmp_path):
    export(source, tmp_path / "export")
    expected = {name: boxes for name, boxes in boxes_of(source / "data.yaml").items() if name.startswith("train")}
    assert boxes_of(tmp_path / "export") == expected


@pytest.mark.parametrize(
    ("where", "name"), [(".", "export"), (".", "export/"), ("export", "."), ("export/train", "..")]
)
def test_it_may_be_named_relative_to_the_working_folder(source, tmp_path, monkeypatch, where, name):
    roboflow_coco(source, tmp_path / "export")
    monkeypatch.chdir(tmp_path / where)
    assert boxes_of(name) == boxes_of(source / "data.yaml")
    assert load_dataset_spec(name).notes[0].startswith(f"{tmp_path / 'export'}: COCO JSON")


@pytest.mark.parametrize("export", [label_img, darknet, roboflow_coco, roboflow_voc], ids=lambda e: e.__name__)
def test_its_name_may_end_with_a_space(export, source, tmp_path):
    export(source, tmp_path / "export")
    expected = boxes_of(tmp_path / "export")
    (tmp_path / "export").rename(tmp_path / "export ")
    index = load_index(load_dataset_spec(tmp_path / "export "), "train", IndexSettings(progress=False))
    assert not any(name.startswith("..") for name in index.paths)
    assert boxes_of(tmp_path / "export ") == expected


def test_voc_without_an_object_is_an_error_and_utf_16_is_not(source, tmp_path):
    roboflow_voc(source, tmp_path / "export")
    for path in (tmp_path / "export").rglob("*.xml"):
        path.write_text(path.read_text(), encoding="utf-16")
    assert boxes_of(tmp_path / "export") == boxes_of(source / "data.yaml")
    for path in (tmp_path / "export").rglob("*.xml"):
        path.write_text("<annotation></annotation>")
    with refused("data set .../export: .../export/train, .../export/valid: no object in any XML"):
        load_dataset_spec(tmp_path / "export")


def test_one_line_describes_the_data_set_that_was_found(source, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)
    roboflow_coco(source, tmp_path / "export")
    with caplog.at_level(logging.INFO, "lockstep"):
        spec = open_data(DataSource(str(tmp_path / "export"), ("train", "val")), DistributedContext.single())
    assert f"{tmp_path / 'export'}: COCO JSON; train train, val valid" in caplog.text
    assert list(spec.splits) == ["train", "val"]


def test_a_yaml_decides_which_of_the_folders_are_splits(source, tmp_path):
    folder = tmp_path / "export"
    copy_set(source, folder / "{}", folder / "{}", ".txt", {"train": "train", "val": "test1"})
    copy_set(source, folder / "{}", folder / "{}", ".txt", {"val": "test2"})
    with refused("test1 and ...test2 are both 'test'; rename one, or write a YAML with 'train:' and 'val:'"):
        load_dataset_spec(folder)
    (folder / "data.yaml").write_text("train: train\nval: test1\ntest: test2\nnames: [light, dark]\n")
    assert list(load_dataset_spec(folder).splits) == ["train", "val", "test"]


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        (".pre-commit-config.yaml", "train: gone\n", NAMES),
        ("dvc.yaml", "stages:\n  train:\n    cmd: train.py\n", NAMES),
        ("my.yaml", "names: [a, b]\npath: .\n", ["a", "b"]),
        ("my.yaml", "names: [a, b]\nnc: 2\n", ["a", "b"]),
        ("my.yaml", "names: [a, b]\nversion: 1\ntask: detect\nlicense: MIT\n", ["a", "b"]),
        ("data.yaml", "names: [a, b]\nclasses: {b: c}\n", ["a", "c"]),
    ],
)
def test_only_a_yaml_that_describes_data_is_that_of_a_folder(name, text, names, source, tmp_path):
    folder = tmp_path / "export"
    copy_set(source, folder / "{}", folder / "{}", ".txt")
    (folder / "classes.txt").write_text("\n".join(NAMES))
    (folder / name).write_text(text)
    assert load_dataset_spec(folder).names == tuple(names)
    (folder / "docker-compose.yml").write_text("services: {}\n")
    assert load_dataset_spec(folder).names == tuple(names)


def test_a_misspelled_split_in_the_yaml_of_a_folder_is_named(source, tmp_path):
    copy_set(source, tmp_path / "export/{}", tmp_path / "export/{}", ".txt")
    (tmp_path / "export/data.yaml").write_text("trian: train\nnames: [a, b]\n")
    with refused("data.yaml: unknown key 'trian' (did you mean 'train'?)"):
        load_dataset_spec(tmp_path / "export")


def test_the_names_of_a_yaml_number_the_classes_of_voc(source, tmp_path):
    roboflow_voc(source, tmp_path / "export")
    names = ["zebra", *NAMES]
    (tmp_path / "export" / "data.yaml").write_text(f"names: {names}\nnc: 3\n")
    assert load_dataset_spec(tmp_path / "export").names == tuple(names)
    index = load_index(load_dataset_spec(tmp_path / "export"), "train", IndexSettings(progress=False))
    assert set(index.classes.tolist()) <= {1, 2}


def test_a_voc_file_that_cannot_be_read_is_left_to_the_scan(source, tmp_path):
    roboflow_voc(source, tmp_path / "export")
    os.mkfifo(tmp_path / "export" / "train" / "pipe.xml")
    (tmp_path / "export" / "train" / "cut.xml").write_text("<annotation><object><name>glow</name>")
    assert {*NAMES} <= set(load_dataset_spec(tmp_path / "export").names) <= {*NAMES, "glow"}


def test_the_json_files_of_a_folder_are_not_all_in_memory(source, tmp_path):
    """The annotations of COCO 2017 are 2 GB."""
    coco_2017(source, tmp_path / "export")
    expected = load_dataset_spec(tmp_path / "export")
    size = 4_000_000
    for i in range(12):
        (tmp_path / f"export/annotations/captions_val2017_{i}.json").write_text(f'{{"info": "{"x" * size}"}}')
    tracemalloc.start()
    try:
        assert load_dataset_spec(tmp_path / "export").splits == expected.splits
        assert tracemalloc.get_traced_memory()[1] < 5 * size
    finally:
        tracemalloc.stop()


def test_a_json_is_read_twice_however_often_the_data_set_is_opened(source, tmp_path, monkeypatch):
    coco_2017(source, tmp_path / "export")
    for path in (tmp_path / "export" / "annotations").iterdir():
        path.write_text(path.read_text().replace('"supercategory"', '"group"'))
    reads = []
    plain = safe_io.read_regular

    def read_and_count(path, *args):
        reads.append(Path(path).name)
        return plain(path, *args)

    monkeypatch.setattr(safe_io, "read_regular", read_and_count)
    check_data(str(tmp_path / "export"), ("train", "val"))
    for _ in range(2):
        names = load_dataset_spec(tmp_path / "export").names
    assert sorted(reads) == ["instances_train2017.json"] * 2 + ["instances_val2017.json"]
    path = tmp_path / "export" / "annotations" / "instances_train2017.json"
    path.write_text(path.read_text().replace('"light"', '"brighter"'))
    assert load_dataset_spec(tmp_path / "export").names == tuple(name.replace("light", "brighter") for name in names)


@pytest.mark.parametrize("name", ["test_{:03}.JPG", "train{}.Png", "val {}.jpg"])
def test_labels_next_to_images_are_no_lists_although_they_are_named_after_splits(tmp_path, name):
    (tmp_path / "classes.txt").write_text("a\n")
    for i in range(3):
        image = tmp_path / name.format(i)
        write_image(image, 48, 64)
        image.with_suffix(".txt").write_text("0 0.5 0.5 0.2 0.2\n")
    index = load_index(load_dataset_spec(tmp_path), "train", IndexSettings(progress=False))
    assert list(index.paths) == sorted(name.format(i) for i in range(3))
    assert len(index.classes) == 3


def test_a_list_next_to_a_broken_link_of_its_name_is_no_label_file(tmp_path):
    (tmp_path / "classes.txt").write_text("a\n")
    write_image(tmp_path / "0.jpg", 48, 64)
    (tmp_path / "0.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (tmp_path / "train.txt").write_text("0.jpg\n")
    (tmp_path / "train.jpg").symlink_to("gone.jpg")
    assert load_dataset_spec(tmp_path).split("train").images == (tmp_path / "train.txt",)


def test_names_of_splits():
    names = {"Train": "train", "trainval": "train", "val2017": "val", "validation": "val", "test_2": "test"}
    assert {name: split_of(name) for name in (*names, "trainer")} == names | {"trainer": ""}


def test_tens_of_thousands_of_names_take_a_moment(tmp_path):
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    (tmp_path / "classes.txt").write_text("".join(f"a{i}\n" for i in range(60_000)))
    start = time.process_time()
    assert len(load_dataset_spec(tmp_path).names) == 60_000
    with open(tmp_path / "classes.txt", "a") as file:
        file.write("a7\n")
    with refused("...: names: several classes are called 'a7'; class names must be unique"):
        load_dataset_spec(tmp_path)
    assert time.process_time() - start < 10  # comparing each with all takes a minute
