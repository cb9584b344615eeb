"""Paths are looked up in several places, and a missing one is named with what is there instead."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data.labels.yolo import YOLO
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.missing_data import labels_without_images, nearby_paths_hint
from tests.data.source.yaml_file import write_yaml
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset
from utils.errors import UserError


def test_path_is_looked_up_next_to_the_yaml_then_in_the_working_folder(tmp_path, monkeypatch):
    here = tmp_path / "here"
    home = tmp_path / "home"
    for folder in (here / "set", home / "set", here / "only"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    body = "train: images/train\nnames: [a]\n"
    assert load_dataset_spec(write_yaml(home, "path: set\n" + body)).root == home / "set"
    assert load_dataset_spec(write_yaml(home, "path: only\n" + body)).root == here / "only"
    assert load_dataset_spec(write_yaml(home, f"path: {here / 'set'}\n" + body)).root == here / "set"
    assert load_dataset_spec(write_yaml(home, "path: ../here/set\n" + body)).root == here / "set"
    assert load_dataset_spec(write_yaml(home, "path: nowhere\n" + body)).root == home / "nowhere"
    for nothing in ("", "path:\n"):
        spec = load_dataset_spec(write_yaml(home, nothing + body))
        assert spec.root == home
        assert spec.split("train").images == (home / "images" / "train",)
    assert load_dataset_spec(os.path.relpath(home / "d.yaml", here)).root == home


def test_parent_folder_entries_of_exports_resolve_to_the_yamls_folder(tmp_path):
    """A labeling service exports ``../train/images`` although ``train/images`` is next to the YAML."""
    (tmp_path / "set" / "train" / "images").mkdir(parents=True)
    text = "train: ../train/images\nval: ../valid/images\nnc: 1\nnames: ['a']\nroboflow:\n  license: MIT\n"
    spec = load_dataset_spec(write_yaml(tmp_path / "set", text))
    assert spec.split("train").images == (tmp_path / "set" / "train" / "images",)
    assert spec.split("val").images == (tmp_path / "valid" / "images",)


def test_separators_of_windows_are_read_where_only_that_path_exists(tmp_path):
    (tmp_path / "set/images/train").mkdir(parents=True)
    (tmp_path / "set/images/val").mkdir()
    text = "path: .\\set\ntrain: [images\\train]\nval: ..\\images\\val\nannotations: images\\val\nnames: [a]\n"
    path = write_yaml(tmp_path, text)
    spec = load_dataset_spec(path)
    assert spec.split("train").images == (tmp_path / "set/images/train",)
    assert spec.split("val").images == (tmp_path / "set/images/val",)
    assert spec.split("val").annotations == tmp_path / "set/images/val"
    assert spec.notes == (
        f"{path}: train: images\\train is read as {tmp_path}/set/images/train",
        f"{path}: val: ..\\images\\val is read as {tmp_path}/set/images/val",
    )
    (tmp_path / "set/images\\train").mkdir()  # a folder of this name is one
    assert load_dataset_spec(path).split("train").images == (tmp_path / "set/images\\train",)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("images\\tra", r"folders are separated by / here, not by \\;"),
        ("C:\\sets\\train", r"folders are separated by / here, not by \\;"),
        ('"images\\train"', r"'images\\train' has a control character: in double quotes, YAML takes \\t for a tab;"),
    ],
)
def test_missing_paths_of_windows_are_named(tmp_path, entry, reason):
    (tmp_path / "images/train").mkdir(parents=True)
    spec = load_dataset_spec(write_yaml(tmp_path, f"train: {entry}\nnames: [a]\n"))
    with pytest.raises(UserError) as caught:
        spec.check_split("train")
    assert reason.replace("\\\\", "\\") in str(caught.value)


@pytest.mark.parametrize(
    ("there", "entry", "message"),
    [
        ("images/validate", "images/val", "; '.../images/validate' exists"),
        ("Images/val", "images/val", "; '.../Images' exists"),
        ("images/a images/b", "images/val", "; .../images has a, b"),
        ("valid", "images/val", ""),
        ("a b c d e f", "val", "; ... has a, b, c, d, e, ..."),
        ("lists/vall.txt", "lists/val.txt", "; '.../lists/vall.txt' exists"),
        ("images", "images/*.jpg", "; patterns are not expanded: name the folder, .../images"),
    ],
)
def test_a_missing_path_says_what_is_there(tmp_path, there, entry, message):
    for path in there.split():
        (tmp_path / path).mkdir(parents=True)
    with refused(f"{entry}: not found (named by .../d.yaml){message}; correct its paths"):
        list_split(load_dataset_spec(write_yaml(tmp_path, f"val: {entry}\nnames: [a]\n")), "val")


def test_missing_annotations_without_names_are_named_with_the_yaml(tmp_path):
    (tmp_path / "train.json").touch()
    with refused("trian.json: not found (named by .../d.yaml); '.../train.json' exists; correct its paths"):
        load_dataset_spec(write_yaml(tmp_path, "train: images\nannotations: trian.json\n"))


def test_labels_without_images_are_seen_in_each_format_of_a_suffix(tmp_path, monkeypatch):
    write_dataset(tmp_path, train=2, val=1)
    shutil.rmtree(tmp_path / "images")
    other = replace(YOLO, files=replace(YOLO.files, is_labels=lambda head: False))
    monkeypatch.setattr("data.source.missing_data.LABEL_FORMATS", (YOLO, other))
    assert "has 3 label files" in labels_without_images(tmp_path)


def test_there_is_no_hint_where_no_folder_exists(monkeypatch):
    """Some systems have none after the working folder has been deleted."""
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    assert nearby_paths_hint(Path("folder/nothing.yaml")) == ""


@pytest.mark.parametrize(
    ("name", "message"), [("x" * 256, "x..."), ("a/" * 2100, "a/..."), ("../" + "x" * 256, "../x...")]
)
def test_a_path_that_is_too_long_is_one_line(tmp_path, name, message):
    with refused(f"d.yaml: train: a path or a name in it is longer than file systems allow: {message}") as caught:
        load_dataset_spec(write_yaml(tmp_path, f"train: {name}\nval: {name}\nnames: [a]\n"))
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("character", ["x", "é"])
def test_a_path_that_is_too_long_only_in_its_folder_is_one_line(tmp_path, character):
    """File systems limit the bytes of the whole path."""
    entry = "/".join([character * 100] * (3900 // (100 * len(character.encode()) + 1)))
    folder = tmp_path / ("f" * 200)
    path = write_yaml(folder, f"train: {entry}\nnames: [a]\n")
    with refused(f"d.yaml: train: a path or a name in it is longer than file systems allow: {str(folder)[:100]}..."):
        load_dataset_spec(path).check_split("train")


@pytest.mark.parametrize("path", ["/content/datasets/x", "datasets/x"])
def test_the_message_says_that_a_data_set_has_moved_with_its_yaml(tmp_path, path):
    """The ``path`` of a YAML from Colab is that of another machine."""
    (tmp_path / "images/train").mkdir(parents=True)
    spec = load_dataset_spec(write_yaml(tmp_path, f"path: {path}\ntrain: images/train\nnames: [a]\n"))
    with refused(f"{tmp_path}/images/train exists: remove the key 'path' from the YAML"):
        spec.check_split("train")
