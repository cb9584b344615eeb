"""All files that a command names are checked before any of them is reported."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import export
from engine.commands.input_files import check_training_files, check_validation
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset
from utils.config.commands import COMMANDS
from utils.config.settings import AUTO, TrainConfig, ValConfig
from utils.errors import UserError

DATA = "data set none.yaml: no such file"
WEIGHTS = "none.pt: neither a file nor the name of public weights"
MODEL = "--model nothing: unknown model"
RECIPE = "--hyp nowhere: no such recipe or file"


@pytest.mark.parametrize(
    ("command", "given", "starts"),
    [
        ("train", "--data none.yaml --weights none.pt --model nothing --hyp nowhere", [DATA, MODEL, WEIGHTS, RECIPE]),
        (
            "train",
            "--data set/data.yaml --weights none.pt --set lr0=x lrf=2 mosaik=1",
            [WEIGHTS, "--set: lr0: ", "--set: lrf: ", "--set: unknown key 'mosaik' (did you mean 'mosaic'?)"],
        ),
        ("val", "--data none.yaml --weights none.pt", [DATA, WEIGHTS]),
        ("detect", "--source none.jpg --weights none.pt", ["none.jpg: no such file or folder", WEIGHTS]),
        ("export", "--data none.yaml --weights none.pt", [DATA, WEIGHTS]),
        ("check", "none.yaml --weights none.pt", [DATA, WEIGHTS]),
        ("train", "--data none.yaml --weights d.yaml", [DATA, "--weights d.yaml: is a YAML; "]),
        ("detect", "--source none.jpg --weights a.jpg", ["none.jpg: ", "--weights a.jpg: is an image, not weights"]),
        ("train", "--data none.yaml --teacher none.pt", [DATA, WEIGHTS]),
        (
            "train",
            "--data none.yaml --weights a.onnx --teacher b.torchscript",
            [DATA, "--weights a.onnx: is an exported model; ", "--teacher b.torchscript: is an exported model; "],
        ),
        ("kfold", "--data none.yaml --weights none.pt --folds 3", [DATA, WEIGHTS]),
        ("search", "--data none.yaml --weights none.pt", [DATA, WEIGHTS]),
    ],
)
def test_every_missing_file_is_named(tmp_path: Path, monkeypatch, command, given, starts):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "set", train=1, val=1)
    with pytest.raises(UserError) as caught:
        import_module(COMMANDS[command].path.replace("/", ".")).main(given.split())
    assert len(caught.value.parts) == len(starts), caught.value.parts
    for message, start in zip(caught.value.parts, starts):
        assert message.startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_all_flags_of_an_export_that_rule_each_other_out_are_named():
    with pytest.raises(UserError, match=r"^3 mistakes: \(1\) --half and --int8: .*; \(2\) --int8: .*; \(3\) --dynamic"):
        export.main(["--weights=none.pt", "--half", "--int8", "--format", "pt2", "onnx", "--dynamic", "--batch=2"])


def test_val_may_be_missing_where_the_weights_may_have_held_out_part_of_train(tmp_path: Path):
    """``--val-fraction``: only the weights tell. Public weights have held out nothing."""
    data = write_dataset(tmp_path / "set", train=1, val=1)
    data.write_text("train: images/train\nnames: [light, dark]\n")
    weights = tmp_path / "best.pt"
    weights.touch()
    check_validation(ValConfig(weights=str(weights), data=str(data)))
    with refused("has no 'val' split, only train; add 'val: <folder>', or train with --val-fraction 0.2 or ..."):
        check_validation(ValConfig(weights="yolov8n.pt", data=str(data)))
    with refused("has no 'test' split, only train; add 'test: <folder>'"):
        check_validation(ValConfig(weights=str(weights), data=str(data), task="test"))


def test_a_run_that_has_ended_needs_no_data(tmp_path: Path):
    config = TrainConfig(data=str(tmp_path / "gone.yaml"), project=str(tmp_path), resume=AUTO)
    with pytest.raises(UserError, match=r"gone\.yaml: no such file"):
        check_training_files(config)
    config.folder.mkdir()
    (config.folder / "last.pt").touch()
    check_training_files(config)
