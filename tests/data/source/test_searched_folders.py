"""Runs must not be written into folders that their data sets search for images, under any name."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import yaml

import train
import val
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.open import open_data
from data.source.searched_folders import problem_of_output
from tests.helpers.messages import refused
from tests.helpers.scripts import PLAIN, SMALL, call, error_of
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_dataset, write_weights
from tools.kfold.__main__ import main as kfold
from tools.search.__main__ import main as search
from utils.distributed.context import DistributedContext

PROBLEM = (
    "is in .../images/train, which .../data.yaml searches for images; plots there would become images of the data set"
)


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """The YAML of a folder with images and labels side by side, which is both splits."""
    write_dataset(tmp_path / "set", train=8)
    folder = tmp_path / "flat"
    folder.mkdir()
    for kind in ("images", "labels"):
        for file in (tmp_path / "set" / kind / "train").iterdir():
            shutil.copy(file, folder)
    (folder / "data.yaml").write_text(yaml.safe_dump({"train": ".", "val": ".", "names": ["light", "dark"]}))
    return folder / "data.yaml"


def is_refused(data: Path, output: Path) -> bool:
    return problem_of_output(output, load_dataset_spec(data)) != ""


def describe(root: Path, **content: object) -> Path:
    """Writes a YAML, and returns its path."""
    path = root / "data.yaml"
    path.write_text(yaml.safe_dump({"names": ["light", "dark"]} | content))
    return path


def test_only_folders_that_are_searched_are_refused(tmp_path):
    data = write_dataset(tmp_path / "set")
    for output in ("runs", "set", "set/runs/train", "set/images", "set/labels/train/runs", "set/images/trainer/runs"):
        assert not is_refused(data, tmp_path / output), output
        assert not is_refused(tmp_path / "set", tmp_path / output), output
    for output in ("set/images/train", "set/images/val/runs/train/exp", "set/labels/../images/val/runs"):
        assert is_refused(data, tmp_path / output), output
        assert is_refused(tmp_path / "set", tmp_path / output), output
    assert not is_refused(data, tmp_path / "set/images/train/.hidden/runs"), "hidden folders are not searched"
    data = describe(tmp_path / "set", train="images/train", test="images/val")
    assert is_refused(data, tmp_path / "set/images/val/runs"), "of a split that the run does not use"


def test_links_lead_to_the_same_folders(tmp_path):
    data = write_dataset(tmp_path / "set")
    (tmp_path / "link").symlink_to("set/images")
    assert is_refused(data, tmp_path / "link/val/runs")
    (tmp_path / "scratch").mkdir()
    assert not is_refused(data, tmp_path / "scratch/exp")
    (tmp_path / "set/images/train/runs").symlink_to(tmp_path / "scratch")
    assert is_refused(data, tmp_path / "scratch/exp"), "the images' folder leads here"
    assert is_refused(data, tmp_path / "set/images/train/runs/exp")


def test_folders_of_listed_images_and_of_shards_are_not_searched(tmp_path):
    root = tmp_path / "set"
    write_dataset(root)
    for split in ("train", "val"):
        files = sorted((root / "images" / split).iterdir())
        (root / f"{split}.txt").write_text("".join(f"{file}\n" for file in files))
    assert not is_refused(describe(root, train="train.txt", val="val.txt"), root / "images/train/runs")
    assert is_refused(describe(root, train=["train.txt", "images/val"], val="val.txt"), root / "images/val/runs")
    assert not is_refused(describe(root, train="train.shards", val="val.shards"), root / "runs")


def test_folders_with_one_label_file_and_of_joined_data_sets_are_searched(tmp_path):
    names = [f"{i}.png" for i in range(4)]
    boxes = {name: [(0, 5, 10, 30, 40)] for name in names}
    write_three_formats(tmp_path / "coco", ["cat"], dict.fromkeys(names, (60, 80)), boxes)
    content = {"train": "images/train", "val": "images/train", "annotations": "instances.json", "names": ["cat"]}
    data = describe(tmp_path / "coco", **content)
    assert is_refused(data, tmp_path / "coco/images/train/runs")
    assert not is_refused(data, tmp_path / "coco/runs")
    joined = describe(tmp_path, train=["coco/data.yaml"], val=["coco/data.yaml"], names=["cat"])
    assert is_refused(joined, tmp_path / "coco/images/train/runs")
    assert not is_refused(joined, tmp_path / "runs")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_that_lies_there_continues_with_a_warning(tmp_path, caplog, is_copied):
    """A copy (--stage) is in another folder; the plots would still be among the images of the original."""
    data = write_dataset(tmp_path / "set")
    stage = str(tmp_path / "stage") if is_copied else ""
    output = str(tmp_path / "set/images/train/runs/exp")
    source = DataSource(str(data), ("train", "val"), stage=stage, output=output)
    with refused(f"/set/images/train/runs/exp: {PROBLEM}; name another folder with --project, or use --noplots"):
        open_data(source, DistributedContext.single())
    source = DataSource(str(data), ("train", "val"), stage=stage, output=output, continues_output=True)
    with caplog.at_level(logging.WARNING):
        open_data(source, DistributedContext.single())
    assert [message.partition("; move the run")[1] for message in caplog.messages] == ["; move the run"]


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (train.main, ["--model", "yolov8n", *SMALL, "--no-noplots"]),
        (kfold, ["--model", "yolov8n", "--folds", "2", *SMALL, "--no-noplots"]),
        (search, ["--model", "yolov8n", "--trials", "2", *SMALL, "--no-noplots"]),
        (val.main, ["--weights", "best.pt", "--device", "cpu"]),
    ],
)
def test_each_command_with_plots_refuses_before_it_writes(flat, monkeypatch, capsys, main, flags):
    monkeypatch.chdir(flat.parent)
    if main is val.main:
        write_weights(Path("best.pt"), ["light", "dark"])
    before = set(flat.parent.rglob("*"))
    error = error_of(capsys, main, "--data", "data.yaml", *flags)
    assert f"is in {flat.parent}, which " in error
    assert "with --project" in error
    assert set(flat.parent.rglob("*")) == before


def test_results_without_plots_add_no_image(flat, monkeypatch):
    monkeypatch.chdir(flat.parent)
    before = list_split(load_dataset_spec(flat), "val").images
    weights = write_weights(Path("best.pt"), ["light", "dark"])
    call(val.main, "--data", "data.yaml", "--weights", weights, *PLAIN)
    assert Path("runs/val/exp").is_dir()
    assert list_split(load_dataset_spec(flat), "val").images == before
