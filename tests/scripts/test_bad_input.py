"""Mistakes of users: one line that says what to do, exit code 2, and no damage to saved files."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest
import torch
import yaml

import detect
import train
import val
from tests.helpers.scripts import PLAIN, SMALL, call, error_of, training, write_inputs
from tests.helpers.tiny import write_dataset
from tools import search


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A tiny data set, a model, and a run of two epochs."""
    root = write_inputs(tmp_path_factory.mktemp("inputs"), train=8, val=3)
    call(train.main, *training(root, root / "runs", "--epochs", "2"))
    return root


@pytest.mark.parametrize(
    ("main", "argv", "line"),
    [
        (train.main, [], "--data: name the data set"),
        (train.main, ["--resume", "auto"], "--data: name the data set; known by name: demo, "),
        (search.main, [], "required: --data"),
    ],
)
def test_a_training_needs_a_data_set(tmp_path, capsys, main, argv, line):
    assert line in error_of(capsys, main, "--project", tmp_path / "runs", "--device", "cpu", *argv)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--set", "box=.inf"], "--set: box: must be a finite number"),
        (["--batch_sise", "4"], "did you mean '--batch-size'"),
        (["--model", "yolov9z"], "yolov9z"),
        (["--fitness", "AP:drak"], "did you mean 'dark'?"),
        (["--imgsz", "65"], "use 64 or 96"),
        (["--device", "0,1"], "no CUDA GPU is available here; use --device cpu"),
    ],
)
def test_mistakes_in_flags_are_one_line_before_data_is_read(tmp_path, capsys, monkeypatch, argv, line):
    """Copying and scanning data may take hours."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    unread = write_dataset(tmp_path / "set", train=0, val=0)
    assert line in error_of(capsys, train.main, "--data", unread, *SMALL, "--project", tmp_path / "runs", *argv)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("names", [["a", "b", "c"], ["dark", "light"]])
def test_a_run_is_not_continued_with_other_classes(inputs, tmp_path, capsys, names):
    data = yaml.safe_load((inputs / "set" / "data.yaml").read_text()) | {"path": str(inputs / "set"), "names": names}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(data))
    given = ["--resume", inputs / "runs" / "exp" / "last.pt", "--epochs", "3", "--data", tmp_path / "other.yaml"]
    assert "class" in error_of(capsys, train.main, *given)


CROP = "{name: RandomCrop, height: 70, width: 70, p: 0.001}"


@pytest.mark.parametrize(
    ("argv", "transforms", "line"),
    [
        (["--imgsz", "128", "--multi-scale", "0.5"], CROP, "RandomCrop on 64 x 64 pixels of 3 channels: "),
        ([], "{name: OneOf, transforms: [{name: Blur}, " + CROP + "]}", "RandomCrop on 64 x 64 pixels"),
        ([], "{name: ToFloat, p: 0.01}", "ToFloat on 64 x 64 pixels of 3 channels: the pipeline returns float32"),
    ],
)
def test_a_transform_that_fails_on_some_images_is_refused_before_the_first_step(
    inputs, tmp_path, capsys, argv, transforms, line
):
    argv = training(inputs, tmp_path / "runs", *argv, "--set", f"albumentations=[{transforms}]")
    assert line in error_of(capsys, train.main, *argv)
    assert not (tmp_path / "runs").exists()


def test_a_transform_that_another_one_prepares_is_not_refused(inputs, tmp_path):
    pad = "{name: PadIfNeeded, min_height: 100, min_width: 100, p: 1}"
    transforms = f"[{pad}, {CROP}, {{name: OneOf, p: 0.2, transforms: [{{name: CLAHE}}]}}]"
    call(train.main, *training(inputs, tmp_path, "--epochs", "1", "--set", f"albumentations={transforms}"))


@pytest.mark.parametrize(
    ("val", "is_staged", "line"),
    [("empty.txt", True, "left out"), (["images/gone", "images/val"], False, "images/gone")],
)
def test_a_missing_or_empty_validation_split_may_be_held_out(inputs, tmp_path, capsys, val, is_staged, line):
    data = write_dataset(tmp_path / "set", train=8, val=0)
    (tmp_path / "set" / "empty.txt").write_text("")
    data.write_text(yaml.safe_dump({"train": "images/train", "val": val, "names": ["light", "dark"]}))
    argv = training(inputs, tmp_path / "runs", "--data", data, "--epochs", "1", "--val-fraction", "0.25")
    call(train.main, *argv, *(["--stage", tmp_path / "stage"] if is_staged else []))
    out = capsys.readouterr().out
    assert "2 of 8 training images are held out" in out
    assert line in out


def test_a_refused_training_leaves_no_folder(inputs, tmp_path, capsys):
    """Neither the run's folder nor a new folder of runs is left; existing ones are kept with their content."""
    data = write_dataset(tmp_path / "set", train=8, val=3)
    (tmp_path / "set" / "images" / "train" / "bad.png").write_text("no image")
    for project in (tmp_path / "deep" / "runs", tmp_path / "set"):
        error_of(capsys, train.main, *training(inputs, project, "--data", data, "--max-bad", "0"))
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["set"]
    assert sorted(p.name for p in (tmp_path / "set").iterdir()) == ["data.yaml", "images", "labels"]


def test_a_refused_validation_or_detection_leaves_no_folder(inputs, tmp_path, capsys):
    """The work may have started before the refusal: a validation image and a video that cannot be read."""
    weights = ["--weights", inputs / "runs" / "exp" / "best.pt"]
    data = write_dataset(tmp_path / "set", train=1, val=3)
    argv = [*weights, "--data", data, *PLAIN, "--project", tmp_path / "runs"]
    call(val.main, *argv, "--project", tmp_path / "first")  # so that the scan is cached
    picture = tmp_path / "set" / "images" / "val" / "001.png"
    stamp = picture.stat().st_mtime_ns
    size = picture.stat().st_size
    picture.write_bytes(b"x" * size)
    os.utime(picture, ns=(stamp, stamp))
    assert "001.png" in error_of(capsys, val.main, *argv)
    (tmp_path / "clip.mp4").write_text("no video")
    error_of(capsys, detect.main, *weights, "--source", tmp_path / "clip.mp4", "--project", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_files_of_each_skipped_step_are_in_the_log(inputs, tmp_path, capsys, monkeypatch):
    total_norm = torch.nn.utils.get_total_norm
    steps = itertools.count()

    def overflowing(gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor(math.inf) if next(steps) == 1 else total_norm(gradients)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", overflowing)
    call(train.main, *training(inputs, tmp_path, "--epochs", "1"))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "non-finite" in line)
    assert line.startswith("warning: non-finite gradient (norm inf), step skipped; its files: ")
    files = line.partition("its files: ")[2].split()
    assert all(Path(file).is_file() for file in files)
    assert len(files) == 4


def test_a_run_whose_images_vanish_names_the_command_that_continues_it(inputs, tmp_path, capsys, monkeypatch):
    """ "Start again" was read literally, and the run thrown away."""
    data = write_dataset(tmp_path / "set", train=8, val=3)
    (tmp_path / "moving.py").write_text(f"import shutil\ndef on_epoch(run): shutil.rmtree({str(tmp_path / 'set')!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    argv = training(inputs, tmp_path / "runs", "--data", data, "--epochs", "3")
    line = error_of(capsys, train.main, *argv, "--set", "mosaic_block=0", "--callbacks", "moving:on_epoch")
    assert "no such image; restore or remove it; " in line
    assert f"--resume {tmp_path / 'runs' / 'exp' / 'last.pt'} " in line
