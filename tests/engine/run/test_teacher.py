"""Teachers: --keep-old learns new classes without losing the old model's, --teacher adds a model's outputs to the
labels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

import train
import val
from models.detector import build_detector
from models.weights.load import load_detector, model_of
from models.weights.read import read_weights
from models.weights.transfer import transfer_weights
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import PLAIN, SMALL, call, error_of, run_python
from tests.helpers.tiny import (
    TINY_ANCHOR_MODEL,
    TINY_MODEL,
    make_batch,
    randomize_batch_norms,
    write_dataset,
    write_detector,
    write_model,
)
from utils.files.torch_file import read_checkpoint


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Data sets that label light and dark squares, and a model of light ones."""
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=8)
    write_model(root / "tiny.yaml")
    learn = ["--model", root / "tiny.yaml", "--data", root / "set" / "data.yaml", "--classes", "light", *SMALL]
    call(train.main, *learn, "--epochs", "2", "--project", root / "old")
    (root / "old.pt").write_bytes((root / "old" / "exp" / "last.pt").read_bytes())
    for split in ("train", "val"):  # the labels of dark squares alone, as class 0
        shutil.copytree(root / "set" / "images" / split, root / "dark" / "images" / split)
        (root / "dark" / "labels" / split).mkdir(parents=True)
        for path in (root / "set" / "labels" / split).iterdir():
            rows = [f"0{line[1:]}\n" for line in path.read_text().splitlines() if line[0] == "1"]
            (root / "dark" / "labels" / split / path.name).write_text("".join(rows))
    (root / "dark.yaml").write_text("path: dark\ntrain: images/train\nval: images/val\nnames: [dark]\n")
    return root


def flags(inputs: Path, *more: object) -> list[object]:
    arguments = ["--weights", inputs / "old.pt", "--data", inputs / "dark.yaml", "--keep-old", "--epochs", "2", *SMALL]
    return [*arguments, *more]


def taught(inputs: Path, teacher: Path, *more: object) -> list[object]:
    arguments = ["--model", inputs / "tiny.yaml", "--data", inputs / "set" / "data.yaml", "--teacher", teacher, *SMALL]
    return [*arguments, "--epochs", "2", *more]


def test_a_run_resumes_with_its_teacher_and_ends_with_the_same_bits(inputs, tmp_path, capsys):
    """The teacher's file may have moved; its validation and that of its best.pt take the old class for unlabeled."""
    weights = tmp_path / "old.pt"
    whole = tmp_path / "whole"
    shutil.copy(inputs / "old.pt", weights)
    arguments = ["--weights", weights, "--project", tmp_path, "--save-period", "1", "--virtual-ranks", "2"]
    call(train.main, *flags(inputs, *arguments), "--name", "whole")
    log = (whole / "train.log").read_text()
    assert f"--keep-old: light of {weights} kept, dark learned from labels; validation scores the latter" in log
    assert f"val: {inputs / 'dark.yaml'} does not label light: ignored in its images" in log
    assert "also training images" not in log
    content = read_checkpoint(whole / "last.pt")
    assert content["names"] == ["light", "dark"]
    assert content["teacher"]["path"] == str(weights)
    assert "teacher" not in read_checkpoint(whole / "best.pt")
    header = (whole / "results.csv").read_text().splitlines()[0]
    assert {"train/distill", "val/distill"} <= {column.strip() for column in header.split(",")}
    moved = weights.rename(tmp_path / "moved.pt")
    (tmp_path / "again").mkdir()
    shutil.copy(whole / "epoch1.pt", tmp_path / "again" / "last.pt")
    resume = ["--resume", tmp_path / "again"]
    assert str(weights) in error_of(capsys, train.main, *resume)  # is no longer there
    error = error_of(capsys, train.main, *resume, "--teacher", whole / "best.pt")
    assert f"{whole / 'best.pt'} is not the teacher that this run began with ({weights})" in error
    run_python("train.py", *resume, "--teacher", moved, torchrun=2)
    again = read_checkpoint(tmp_path / "again" / "last.pt")
    for part in ("model", "ema", "optimizer"):
        assert_same_content(content[part], again[part])
    capsys.readouterr()
    call(val.main, "--weights", whole / "best.pt", *PLAIN, "--project", tmp_path / "val")
    assert "does not label light" in capsys.readouterr().out


def test_a_model_with_kept_classes_is_scored_on_those_that_it_learned(inputs, tmp_path):
    """--classes names those that its data set labels; val.py scores no others, although the model has them."""
    data = inputs / "set" / "data.yaml"
    call(train.main, *flags(inputs, "--data", data, "--classes", "dark", "--project", tmp_path, "--name", "a"))
    call(val.main, "--weights", tmp_path / "a" / "last.pt", *PLAIN, "--project", tmp_path, "--name", "val")
    rows = (tmp_path / "val" / "classes.csv").read_text().splitlines()
    assert "light,0,0" + "," * (rows[0].count(",") - 2) in rows  # no score, as it has no label
    assert any(row.startswith("dark,1,1,") for row in rows)


def test_the_new_model_begins_as_the_old_one(inputs, tmp_path):
    """Its scores of old classes are the old model's: its class layers stay as wide, 16 channels for 16 classes."""
    names = [f"c{i}" for i in range(16)]
    old = build_detector(TINY_MODEL, 16, names=names, seed=1)
    randomize_batch_norms(old)
    write_detector(tmp_path / "old.pt", old)
    stored = read_weights(tmp_path / "old.pt")
    new = build_detector(model_of(stored), 19, names=[*names, *"xyz"])
    report = transfer_weights(new, stored)
    assert not report.skipped
    images = make_batch(2).images / 255
    with torch.no_grad():
        for ours, theirs in zip(new.eval()(images), old.eval()(images)):
            torch.testing.assert_close(ours[:, : theirs.shape[1]], theirs, rtol=1e-4, atol=1e-5)
            assert ours[:, theirs.shape[1] :].std() > 0
    assert report.new_rows["model.5.cv3.0.2.weight"] == (16, 17, 18)


@pytest.mark.parametrize(
    ("start", "changes", "line"),
    [
        (flags, ["--model", "yolov8n"], "--keep-old and --model: the model is that of --weights"),
        (flags, ["--data", "{}/set/data.yaml"], "leave it out, or name the labeled ones with --classes"),
        (flags, ["--data", "{}/four.yaml"], "old.pt takes images of 3 channels, {}/four.yaml has images of 4"),
        (taught, ["--data", "{}/other.yaml"], "and {}/other.yaml have no class in common"),
        (taught, ["--model", "{}/anchors.yaml"], "only models with anchor-free heads without objectness can be taught"),
    ],
)
def test_impossible_combinations_are_one_line(inputs, teacher, tmp_path, capsys, start, changes, line):
    values = yaml.safe_load((inputs / "dark.yaml").read_text())
    for name, change in {"four": {"channels": 4}, "other": {"names": ["glow"]}}.items():
        (inputs / f"{name}.yaml").write_text(yaml.safe_dump(values | change))
    write_model(inputs / "anchors.yaml", TINY_ANCHOR_MODEL)
    arguments = start(inputs, *([teacher] if start is taught else []), "--project", tmp_path / "runs")
    error = error_of(capsys, train.main, *arguments, *(change.format(inputs) for change in changes))
    assert line.format(inputs) in error
    assert not (tmp_path / "runs").exists()


def test_a_class_of_both_is_learned_from_labels(inputs, tmp_path):
    """The name of the class may differ in case; the model keeps the old model's spelling."""
    values = yaml.safe_load((inputs / "dark.yaml").read_text())
    (inputs / "both.yaml").write_text(yaml.safe_dump(values | {"names": ["LIGHT", "glow"]}))
    common = flags(inputs, "--project", tmp_path)
    call(train.main, *common, "--epochs", "1")
    call(train.main, *common, "--weights", tmp_path / "exp" / "last.pt", "--data", inputs / "both.yaml")
    model, _ = load_detector(tmp_path / "exp2" / "last.pt")
    assert model.names == ("light", "dark", "glow")
    assert "does not label dark: ignored" in (tmp_path / "exp2" / "train.log").read_text()


@pytest.fixture(scope="module")
def teacher(inputs) -> Path:
    """A model of the classes dark, light and other."""
    model = build_detector(TINY_MODEL, 3, names=["dark", "light", "other"], seed=3)
    randomize_batch_norms(model)
    return write_detector(inputs / "teacher.pt", model)
