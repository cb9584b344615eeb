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
from tests.helpers.scripts import PLAIN, SMALL, call, error_of
from tests.helpers.tiny import write_dataset, write_model
from tools import kfold, search


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A tiny data set, a model, and a run of two epochs."""
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=8, val=3)
    write_model(root / "tiny.yaml")
    call(train.main, *flags(root), "--epochs", "2", "--project", root / "runs")
    return root


def flags(inputs: Path) -> list[str]:
    return ["--data", str(inputs / "set" / "data.yaml"), "--model", str(inputs / "tiny.yaml"), *SMALL]


@pytest.mark.parametrize(
    ("main", "argv", "line"),
    [
        (train.main, [], "--data: name the data set"),
        (train.main, ["--resume", "auto"], "--data: name the data set; known by name: demo, "),
        (kfold.main, [], "required: --data"),
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
        (["--imgsz", "65"], "use 64 or 96"),
        (["--device", "0,1"], "no CUDA GPU is available here; use --device cpu"),
        (["--set", "albumentations=[{name: Blurr}]"], "hyper-parameter albumentations"),
    ],
)
def test_mistakes_in_flags_are_one_line_before_data_is_read(tmp_path, capsys, monkeypatch, argv, line):
    """Copying and scanning data may take hours."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    unread = write_dataset(tmp_path / "set", train=0, val=0)
    assert line in error_of(capsys, train.main, "--data", unread, *SMALL, "--project", tmp_path / "runs", *argv)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--model", "coarse.yaml"], "--imgsz 64: too small for the model's stride 64; use 128 or more"),
        (["--resume", "runs/exp/last.pt", "--data", "three.yaml"], "2 classes against"),
        (["--resume", "runs/exp/last.pt", "--data", "swapped.yaml"], "class 0 is 'light' against"),
    ],
)
def test_flags_that_do_not_fit_the_model_or_the_run_are_one_line(inputs, capsys, monkeypatch, argv, line):
    model = yaml.safe_load((inputs / "tiny.yaml").read_text())
    model["backbone"].append([-1, 1, "Conv", [32, 3, 2]])
    (inputs / "coarse.yaml").write_text(yaml.safe_dump(model | {"head": [[[3, 4, 5], 1, "Detect", ["nc"]]]}))
    data = yaml.safe_load((inputs / "set" / "data.yaml").read_text()) | {"path": str(inputs / "set")}
    for name, names in (("three", ["a", "b", "c"]), ("swapped", ["dark", "light"])):
        (inputs / f"{name}.yaml").write_text(yaml.safe_dump(data | {"names": names}))
    monkeypatch.chdir(inputs)
    common = ["--epochs", "3"] if "--resume" in argv else [*flags(inputs), "--project", "other"]
    assert line in error_of(capsys, train.main, *common, *argv)


CROP = "{name: RandomCrop, height: 70, width: 70, p: 0.001}"


@pytest.mark.parametrize(
    ("argv", "transforms", "line"),
    [
        (["--imgsz", "128", "--multi-scale", "0.5"], CROP, "RandomCrop on 64 x 64 pixels of 3 channels: "),
        ([], "{name: OneOf, transforms: [{name: Blur}, " + CROP + "]}", "RandomCrop on 64 x 64 pixels"),
        ([], "{name: Mosaic, p: 0.01}", "Mosaic on 64 x 64 pixels"),
        ([], "{name: ToFloat, p: 0.01}", "ToFloat on 64 x 64 pixels of 3 channels: the pipeline returns float32"),
        (["--imgsz", "128"], "{name: CropAndPad, px: -40, keep_size: false, p: 1}, " + CROP, "RandomCrop on 128 x "),
    ],
)
def test_a_transform_that_fails_on_some_images_is_refused_before_the_first_step(
    inputs, tmp_path, capsys, argv, transforms, line
):
    argv = [*flags(inputs), "--project", tmp_path / "runs", *argv, "--set", f"albumentations=[{transforms}]"]
    assert line in error_of(capsys, train.main, *argv)
    assert not (tmp_path / "runs").exists()


def test_a_transform_that_another_one_prepares_is_not_refused(inputs, tmp_path):
    pad = "{name: PadIfNeeded, min_height: 100, min_width: 100, p: 1}"
    transforms = f"[{pad}, {CROP}, {{name: OneOf, p: 0.2, transforms: [{{name: CLAHE}}]}}]"
    argv = ["--epochs", "1", "--set", f"albumentations={transforms}", "--project", tmp_path]
    call(train.main, *flags(inputs), *argv)


@pytest.mark.parametrize(
    ("val", "is_staged", "line"),
    [
        ("empty.txt", True, "left out"),
        ("images/val", False, "left out"),
        (["images/gone", "empty.txt"], False, "images/gone"),
    ],
)
def test_a_missing_or_empty_validation_split_may_be_held_out(inputs, tmp_path, capsys, val, is_staged, line):
    data = write_dataset(tmp_path / "set", train=8, val=0)
    (tmp_path / "set" / "empty.txt").write_text("")
    data.write_text(yaml.safe_dump({"train": "images/train", "val": val, "names": ["light", "dark"]}))
    argv = [*flags(inputs), "--project", tmp_path / "runs", "--data", data, "--epochs", "1", "--val-fraction", "0.25"]
    call(train.main, *argv, *(["--stage", tmp_path / "stage"] if is_staged else []))
    out = capsys.readouterr().out
    assert "2 of 8 training images are held out" in out
    assert line in out


@pytest.mark.parametrize(
    "argv",
    [
        ["--data", "none.yaml"],
        ["--max-bad", "0"],  # with the file that is no image, below
    ],
)
def test_a_refused_training_leaves_no_folder(inputs, tmp_path, capsys, argv):
    """Neither the run's folder nor a new folder of runs is left; existing ones are kept with their content."""
    data = write_dataset(tmp_path / "set", train=8, val=3)
    if "--max-bad" in argv:
        (tmp_path / "set" / "images" / "train" / "bad.png").write_text("no image")
    for project in (tmp_path / "deep" / "runs", tmp_path / "set"):
        error_of(capsys, train.main, *flags(inputs), "--data", data, "--project", project, *argv)
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
    call(train.main, *flags(inputs), "--epochs", "1", "--project", tmp_path)
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
    argv = [*flags(inputs), "--data", data, "--epochs", "3", "--project", tmp_path / "runs"]
    line = error_of(capsys, train.main, *argv, "--set", "mosaic_block=0", "--callbacks", "moving:on_epoch")
    assert "no such image; restore or remove it; " in line
    assert f"--resume {tmp_path / 'runs' / 'exp' / 'last.pt'} " in line


def test_file_names_that_are_not_utf_8_are_handled(inputs, tmp_path, capsys):
    """Latin-1 bytes, as found on old disks."""
    data = write_dataset(tmp_path / "set", train=3, val=2)
    for split in ("train", "val"):
        for kind, suffix in (("images", b".png"), ("labels", b".txt")):
            folder = os.fsencode(tmp_path / "set" / kind / split)
            os.rename(folder + b"/000" + suffix, folder + b"/caf\xe9" + suffix)
    with open(next((tmp_path / "set" / "labels" / "train").glob("caf*")), "a") as file:
        file.write("nonsense\n")
    lossy = ["--max-bad", "0.5"]
    call(train.main, *flags(inputs), "--data", data, "--epochs", "1", "--project", tmp_path, *lossy)
    weights = ["--weights", tmp_path / "exp" / "last.pt"]
    call(val.main, *weights, *PLAIN, "--project", tmp_path / "val")
    source = ["--source", tmp_path / "set" / "images" / "val", "--device", "cpu", "--project", tmp_path / "found"]
    call(detect.main, *weights, *source, "--save-txt", "--save-json", "--save-crop", "--conf-thres", "0.0001")
    assert len(list((tmp_path / "found" / "exp" / "labels").iterdir())) == 2
    out, err = capsys.readouterr()
    assert "Error" not in err
    assert "caf\\udce9.png" in out
