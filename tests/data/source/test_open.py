"""`open_data` finds data sets by path or name, and leaves out or holds out their validation split."""

from pathlib import Path

import pytest
import yaml

from data.source import dataset_yaml, demo
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.demo import ensure_demo
from data.source.files import list_split
from data.source.open import check_data, open_data
from tests.data.source.yaml_file import write_yaml
from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from tests.helpers.three_formats import write_image
from tests.helpers.tiny import write_dataset
from utils.distributed.context import DistributedContext
from utils.errors import UserError

CONFIGS = ROOT / "configs" / "data"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_yamls_load_without_running_their_downloads(path):
    spec = load_dataset_spec(path)
    assert {"train", "val"} <= set(spec.splits)
    assert "download" not in yaml.safe_load(path.read_text())
    if path.stem != "template":
        assert "download https://" in str(spec.missing_error(path))
    if path.stem.startswith("coco"):
        assert len(spec.names) == 80
        assert (spec.names[0], spec.names[79]) == ("person", "toothbrush")


KNOWN = "known by name: demo, bccd, coco, coco128, coco8"


def open_by_name(data: str):
    return open_data(DataSource(data, ("train",)), DistributedContext.single())


@pytest.mark.parametrize("data", ["coco128", "coco128.yaml"])
def test_public_data_sets_are_found_by_name(tmp_path, monkeypatch, data):
    """As in YOLOv5, a bare name refers to configs/data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets" / "coco128" / "images" / "train2017").mkdir(parents=True)
    assert open_by_name(data).source == str(CONFIGS / "coco128.yaml")


def test_a_file_goes_before_the_public_data_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    write_yaml(tmp_path, "train: images\nnames: [a]\n", "coco128.yaml")
    assert open_by_name("coco128.yaml").names == ("a",)


@pytest.mark.parametrize("is_data_set", [False, True])
def test_demo_is_the_built_in_set_and_one_in_a_folder_of_this_name_is_written_with_a_dot(
    tmp_path, monkeypatch, caplog, is_data_set
):
    """``make demo`` writes its runs to such a folder."""
    monkeypatch.chdir(tmp_path)
    built_in = ensure_demo(tmp_path / "cache/demo", train_images=1, val_images=1, size=64)
    monkeypatch.setattr(demo, "ensure_demo", lambda root: built_in)  # rendering 400 images takes seconds
    (tmp_path / "demo/train").mkdir(parents=True)
    (tmp_path / "demo/train/settings.yaml").write_text("data: demo\n")
    write_image(tmp_path / "demo/train/labels.jpg", 48, 64)
    if is_data_set:
        (tmp_path / "demo/images").mkdir()
        write_yaml(tmp_path / "demo", "train: images\nnames: [mine]\n")
        assert open_by_name("./demo").names == ("mine",)
    assert open_by_name("demo").source == str(built_in)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["--data demo: the built-in demo set; for ./demo, write ./demo"] * is_data_set


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "bccd",
            "datasets/bccd/images/train: not found (named by .../configs/data/bccd.yaml); download "
            "https://github.com/Shenggan/BCCD_Dataset (license: MIT) and unpack it as the first lines of that "
            "file describe",
        ),
        (
            str(CONFIGS / "template.yaml"),
            "configs/data/images/train: not found (named by .../configs/data/template.yaml); correct its paths",
        ),
    ],
)
def test_images_of_a_public_data_set_that_are_not_there_say_where_to_get_them(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    with refused(message):
        list_split(open_by_name(data), "train")


def test_a_yaml_of_ones_own_among_the_public_ones_may_have_an_address_alone(tmp_path, monkeypatch):
    """The hint at the license and the first lines of the file is about the public ones."""
    monkeypatch.setattr(dataset_yaml, "YAML_FOLDER", tmp_path)
    path = write_yaml(tmp_path, "train: images\nnames: [a]\nurl: https://example.org/set.zip\n")
    with refused("images: not found (named by .../d.yaml); correct its paths"):
        list_split(load_dataset_spec(path), "train")


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ("data/bccd.yaml", " (did you mean 'bccd'?)"),
        ("bcd", " (did you mean 'bccd'?)"),
        ("coc", " (did you mean 'coco'?)"),
        ("''", ""),
        ("racoon.yaml", " (did you mean 'datasets/raccoon/data.yaml'?)"),
        ("cone", " (did you mean 'cones.yaml'?)"),
        ("datasets/racoons/set.yaml", "; 'datasets/raccoon' exists"),
        ("nowhere/d.yaml", ""),
        ("xyz", "; the working folder has datasets"),
    ],
)
def test_an_unknown_data_set_is_told_what_is_like_it_and_what_is_known(tmp_path, monkeypatch, data, hint):
    monkeypatch.chdir(tmp_path)
    for name in ("datasets/raccoon/data.yaml", "cones.yaml"):
        write_yaml((tmp_path / name).parent, "train: images\nnames: [a]\n", Path(name).name)
    with refused(f"data set {data}: no such file{hint}; {KNOWN}"):
        open_by_name(data.strip("'"))


@pytest.mark.parametrize("data", ["x" * 300, "x" * 300 + ".yaml", "datasets/" + "x" * 300, "x/" * 3000])
def test_too_long_a_name_is_one_line(data):
    message = f"data set: a path or a name in it is longer than file systems allow: {data[:100]}..."
    with refused(message):
        open_by_name(data)
    with refused(message):
        check_data(data, ("train",))


def test_the_only_yaml_of_a_folder_is_read_and_its_missing_images_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()
    write_yaml(tmp_path, "train: images\nnames: [a]\n", "cones.yaml")
    with refused("images: not found (named by .../cones.yaml); ... has datasets; correct its paths"):
        open_by_name(".")


def test_the_root_of_the_file_system_is_no_data_set():
    with pytest.raises(UserError, match=r"data set /: \d+ images, "):
        open_by_name("/")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_missing_optional_split_is_left_out_with_a_warning(tmp_path, is_copied, caplog):
    """The name may be misspelled: training images would be held out although there are validation images."""
    data = write_dataset(tmp_path / "set", train=4, val=2)
    data.write_text(data.read_text().replace("images/val", "images/vall"))
    source = DataSource(str(data), ("train",), optional=("val",), stage=str(tmp_path / "stage") if is_copied else "")
    assert set(open_data(source, DistributedContext.single()).splits) == {"train"}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "images/vall: not found (named by " in warning
    assert warning.endswith("; 'val' is left out, and part of 'train' is held out in its place")


@pytest.mark.parametrize("has_val", [True, False])
def test_held_out_images_are_the_validation_split_unless_there_is_one(tmp_path, has_val):
    data = write_dataset(tmp_path / "set", train=4, val=2)
    if not has_val:
        data.write_text("train: images/train\nnames: [light, dark]\n")
    source = DataSource(str(data), ("train",), val_images=("images/train/001.png",))
    spec = open_data(source, DistributedContext.single())
    assert spec.is_held_out("val") is not has_val
    assert spec.held_out == (frozenset() if has_val else {"images/train/001.png"})
