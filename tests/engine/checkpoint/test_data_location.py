"""The data set of a checkpoint is found from any working folder, and after a move."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

import train
import val
from engine.checkpoint.data_location import describe_location, find_location
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model
from utils.files.torch_file import read_checkpoint
from utils.process.main import run_main


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A working folder with a run of one epoch, started there with relative paths. The data set's YAML is in another
    folder than the data, and its ``path`` is relative to the working folder."""
    home = tmp_path_factory.mktemp("home")
    write_dataset(home / "work" / "sets" / "tiny", train=4, val=2)
    content = yaml.safe_load((home / "work" / "sets" / "tiny" / "data.yaml").read_text())
    (home / "work" / "yamls").mkdir()
    (home / "work" / "yamls" / "tiny.yaml").write_text(yaml.safe_dump(content | {"path": "sets/tiny"}))
    write_model(home / "work" / "model.yaml")
    before = os.getcwd()
    os.chdir(home / "work")
    try:
        run_main(train.main, ["--data", "yamls/tiny.yaml", "--model", "model.yaml", *SMALL, "--epochs", "1"])
    finally:
        os.chdir(before)
    return home


def go_on(last: Path, epochs: int) -> None:
    run_main(train.main, ["--resume", str(last), "--epochs", str(epochs)])
    assert read_checkpoint(last)["progress"]["epoch"] == epochs


def test_a_copied_run_reads_the_data_of_the_first_folder(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "home")  # the first folder still exists
    monkeypatch.chdir(tmp_path)
    last = tmp_path / "home" / "work" / "runs" / "train" / "exp" / "last.pt"
    go_on(last, 2)
    assert read_checkpoint(last)["config"]["data"] == str(trained / "work" / "yamls" / "tiny.yaml")


def test_a_run_and_its_data_can_be_moved_together(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path / "first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "first" / "work")
    last = tmp_path / "first" / "work" / "runs" / "train" / "exp" / "last.pt"
    run_main(train.main, ["--resume", str(last), "--epochs", "2", "--data", "yamls/tiny.yaml"])
    (tmp_path / "first").rename(tmp_path / "second")
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved = tmp_path / "second" / "work" / "runs" / "train" / "exp" / "last.pt"
    run_main(val.main, ["--weights", str(moved), "--device", "cpu", "--workers", "0"])
    go_on(moved, 3)
    assert read_checkpoint(moved)["data"]["root"] == str(tmp_path / "second" / "work" / "sets" / "tiny")
    shutil.rmtree(tmp_path / "second" / "work" / "yamls")
    line = error_of(capsys, train.main, "--resume", moved, "--epochs", "4")
    assert f"{tmp_path / 'second' / 'work' / 'yamls' / 'tiny.yaml'}: no such file" in line


def test_a_checkpoint_without_a_stored_location_is_read():
    assert find_location({}, "last.pt") == ("", "")
    assert find_location({"source": "/none.yaml", "root": "/none"}, "last.pt") == ("/none.yaml", "/none")
    assert describe_location("/a/b.yaml", "/a", "/a/runs/exp")["source_from_run"] == "../../b.yaml"
