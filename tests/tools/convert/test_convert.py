"""Exports of annotation tools: every object is a box of the same pixels in the COCO JSON, which trains."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.dataset.yaml_file import load_dataset_spec
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from tests.helpers.messages import refused
from tests.helpers.tool_exports import (
    CREATEML,
    SIZES,
    TRUTH,
    WRITERS,
    boxes_of,
    write_createml,
    write_csv,
    write_cvat,
    write_kitti,
    write_labelme,
)
from tools.convert.formats import FORMATS
from tools.convert.to_coco import convert
from utils.config.tool_settings import ANNOTATION_FORMATS


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_object_is_a_box_of_the_same_pixels(write, images, tmp_path):
    write(images)
    before = {path: path.read_bytes() for path in images.rglob("*") if path.is_file()}
    lines = convert(images, tmp_path / "out" / "coco.json")
    expected = Counter((kind, *map(float, corners)) for boxes in TRUTH.values() for kind, *corners in boxes)
    assert boxes_of(tmp_path / "out" / "coco.yaml") == expected
    assert [line.split()[-2:] for line in lines[2:4]] == [["2", "2"], ["1", "1"]]
    assert {path: path.read_bytes() for path in images.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("inside", [False, True])
def test_paths_may_be_relative(write, inside, images, tmp_path, monkeypatch):
    write(images)
    monkeypatch.chdir(images if inside else tmp_path)
    convert(Path("." if inside else "set"), Path("../coco.json" if inside else "coco.json"))
    assert boxes_of(tmp_path / "coco.yaml").total() == sum(map(len, TRUTH.values()))


def test_splits_are_those_of_the_folders(images, tmp_path):
    """Roboflow writes a file into each of train, valid and test."""
    write_csv(images)
    for split in ("train", "valid"):
        (tmp_path / "all" / split).mkdir(parents=True)
        for path in images.iterdir():
            (tmp_path / "all" / split / path.name).write_bytes(path.read_bytes())
    convert(tmp_path / "all", tmp_path / "coco.json")
    spec = load_dataset_spec(tmp_path / "coco.yaml")
    assert [len(load_index(spec, split, IndexSettings(progress=False)).paths) for split in ("train", "val")] == [3, 3]
    assert (tmp_path / "coco-val.json").is_file()


def test_splits_of_one_folder_become_lists(images, tmp_path):
    write_cvat(images)
    text = (images / "annotations.xml").read_text()
    (images / "annotations.xml").write_text(text.replace('name="two.png"', 'name="two.png" subset="Validation"'))
    convert(images, tmp_path / "coco.json")
    spec = load_dataset_spec(tmp_path / "coco.yaml")
    names = {
        split: [Path(p).name for p in load_index(spec, split, IndexSettings(progress=False)).paths]
        for split in spec.splits
    }
    assert names == {"train": ["one.png", "three.png"], "val": ["two.png"]}


@pytest.mark.parametrize("write", [write_labelme, write_kitti])
def test_the_name_of_an_image_is_no_split(write, images, tmp_path):
    """Only the names of folders, and of files that annotate many images, say which split an image is in."""
    write(images)
    for path in sorted(images.rglob("*.*")):
        if path.suffix == ".json":
            path.write_text(path.read_text().replace('"imagePath": "', '"imagePath": "test_'))
        path.rename(path.with_name(f"test_{path.name}"))
    lines = convert(images, tmp_path / "out.json")
    assert lines[0].endswith(": train 3 images")
    assert boxes_of(tmp_path / "out.yaml").total() == sum(map(len, TRUTH.values()))


def test_an_image_is_in_one_split(images, tmp_path):
    """Otherwise it would be in both, with a part of its labels in each."""
    header = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
    (images / "train.csv").write_text(f"{header}one.png,64,48,cat,1,1,9,9\n")
    (images / "val.csv").write_text(f"{header}two.png,64,48,cat,1,1,9,9\none.png,64,48,cat,2,2,9,9\n")
    with refused(".../val.csv:3: one.png is in 'val' here, and in 'train' in .../train.csv:2; remove one of them"):
        convert(images, tmp_path / "coco.json")
    assert not list(tmp_path.glob("coco*"))


def test_images_of_one_name_are_those_of_the_subset(images, tmp_path):
    """A project of CVAT has a folder per subset, which the names do not have."""
    write_cvat(images)
    for subset in ("Train", "Validation"):
        (images / "images" / subset).mkdir(parents=True)
        (images / "images" / subset / "one.png").write_bytes((images / "one.png").read_bytes())
    (images / "one.png").unlink()
    text = (images / "annotations.xml").read_text().replace('name="two.png"', 'name="one.png" subset="Validation"')
    (images / "annotations.xml").write_text(text.replace('name="one.png" w', 'name="one.png" subset="Train" w', 1))
    convert(images, tmp_path / "coco.json")
    val = json.loads((tmp_path / "coco-val.json").read_text())["annotations"]
    assert [box["bbox"] for box in val] == [[0, 0, 80, 60]]


@pytest.mark.parametrize("name", ["DontCare", "dontcare"])  # the latter in NVIDIA TAO
def test_regions_that_kitti_leaves_out_are_ignored(name, images, tmp_path):
    write_kitti(images)
    with open(images / "label_2" / "one.txt", "a") as file:
        file.write(f"{name} -1 -1 -10 1.00 2.00 9.00 9.00 -1 -1 -1 -1000 -1000 -1000 -10\n")
    assert f"{name}: its boxes are regions to ignore" in convert(images, tmp_path / "coco.json")
    assert load_dataset_spec(tmp_path / "coco.yaml").names == ("cat", "wild_dog")


def test_a_whole_number_may_be_the_name_of_a_class(images, tmp_path):
    write_createml(images)
    path = images / CREATEML
    path.write_text(path.read_text().replace('"label": "cat"', '"label": 0'))
    convert(images, tmp_path / "out.json")
    assert yaml.safe_load((tmp_path / "out.yaml").read_text())["names"] == ["0", "wild dog"]


def test_createml_of_apples_documentation(images, tmp_path):
    write_createml(images)
    text = (
        (images / CREATEML).read_text().replace('"annotations"', '"annotation"').replace('"image"', '"imagefilename"')
    )
    (images / CREATEML).write_text(text)
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml").total() == 3


def test_createml_that_begins_with_many_images_without_objects_is_read_by_its_name(images, tmp_path):
    """The format is recognized by the beginning of a file."""
    write_createml(images)
    path = images / CREATEML
    path.write_text(f"[{' ' * 65_536}{path.read_text()[1:]}")
    with refused("set: no format is recognized; formats for --from are cvat, ..."):
        convert(images, tmp_path / "out.json")
    convert(images, tmp_path / "out.json", "createml")
    assert boxes_of(tmp_path / "out.yaml").total() == sum(map(len, TRUTH.values()))


def test_the_yaml_moves_with_its_folder_and_the_command_is_quoted(images, tmp_path, monkeypatch):
    write_createml(images)
    home = tmp_path / "my sets"
    home.mkdir()
    images.rename(home / "set")
    monkeypatch.chdir(home / "set")
    lines = convert(Path("../set"), Path("../set/../out.json"))
    assert lines[-1] == f"train: python train.py --data '{home}/out.yaml' --val-fraction 0.2"
    home.rename(tmp_path / "moved")
    content = yaml.safe_load((tmp_path / "moved/out.yaml").read_text())
    assert (content["path"], content["train"]) == (".", "set")
    spec = load_dataset_spec(tmp_path / "moved/out.yaml")
    assert len(load_index(spec, "train", IndexSettings(progress=False))) == len(TRUTH)


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (("train", "val"), "train: python train.py --data {data}"),
        (("train", "test"), "train: python train.py --data {data} --val-fraction 0.2"),
        (("val", "test"), "training needs a 'train' split, but {data} has only val, test"),
    ],
)
def test_the_last_line_is_a_command_that_training_accepts(splits, expected, images, tmp_path):
    for split in splits:
        folder = tmp_path / "export" / split
        shutil.copytree(images, folder)
        write_createml(folder)
    lines = convert(tmp_path / "export", tmp_path / "out.json")
    assert lines[-1] == expected.format(data=tmp_path / "out.yaml")


def test_what_a_killed_run_left_is_removed(images, tmp_path, monkeypatch):
    write_csv(images)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr("tools.convert.to_coco.write_dataset", lambda *_: os._exit(9))
        convert(images, tmp_path / "out.json")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.glob(".out*"))) == 1
    convert(images, tmp_path / "out.json")
    assert list(tmp_path.glob(".out*")) == []


def test_two_images_of_one_name_are_told_apart_by_their_folders(images, tmp_path):
    write_cvat(images)
    (images / "b").mkdir()
    (images / "one.png").rename(images / "b" / "one.png")
    cv2.imwrite(str(images / "one.png"), np.zeros((99, 99, 3), np.uint8))
    path = images / "annotations.xml"
    path.write_text(path.read_text().replace("one.png", "b/one.png"))
    convert(images, tmp_path / "out.json")
    entries = json.loads((tmp_path / "out.json").read_text())["images"]
    assert {"b/one.png"} == {entry["file_name"] for entry in entries if entry["file_name"].endswith("one.png")}


def test_a_folder_may_have_a_backslash(images):
    write_cvat(images)
    (images / "a\\b").mkdir()
    (images / "two.png").rename(images / "a\\b" / "two.png")
    convert(images, images.parent / "out.json")
    assert boxes_of(images.parent / "out.yaml").total() == sum(map(len, TRUTH.values()))


@pytest.mark.parametrize("size", ["0,0", "-1,-1", ","])
def test_an_unknown_size_is_that_of_the_image(size, images, tmp_path):
    write_csv(images)
    text = (images / "_annotations.csv").read_text()
    (images / "_annotations.csv").write_text(text.replace("two.png,80,60", f"two.png,{size}"))
    convert(images, tmp_path / "out.json")
    sizes = {
        entry["file_name"]: (entry["width"], entry["height"])
        for entry in json.loads((tmp_path / "out.json").read_text())["images"]
    }
    assert sizes == SIZES


def test_labels_for_a_scaled_copy_of_all_images_are_converted(images, tmp_path):
    """Training scales them."""
    write_labelme(images)
    for name, (width, height) in SIZES.items():
        cv2.imwrite(str(images / name), np.zeros((2 * height, 2 * width, 3), np.uint8))
    lines = convert(images, tmp_path / "out.json")
    (line,) = [line for line in lines if line.startswith("labels for another size")]
    file = images / "one.json"
    assert line.startswith(f"labels for another size: 3 images of 'train', first one.png (labeled in {file}): ")
    assert line.endswith("labels are for 64x48, the image is 128x96 upright; boxes are scaled by 2")
    assert boxes_of(tmp_path / "out.yaml")["cat", 8, 12, 60, 80] == 1


def test_the_flag_names_all_formats():
    assert set(FORMATS) == set(ANNOTATION_FORMATS)
