"""All files that a command names are checked before any of them is reported."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from engine.commands.input_files import check_validation
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset
from utils.config.commands import COMMANDS
from utils.config.settings import ValConfig
from utils.errors import UserError

DATA = "data set none.yaml: no such file"
WEIGHTS = "none.pt: neither a file nor the name of public weights"


@pytest.mark.parametrize(
    ("command", "given", "starts"),
    [
        ("val", "--data none.yaml --weights none.pt", [DATA, WEIGHTS]),
        ("detect", "--source none.jpg --weights none.pt", ["none.jpg: no such file or folder", WEIGHTS]),
        ("check", "none.yaml --weights none.pt", [DATA, WEIGHTS]),
        ("detect", "--source none.jpg --weights a.jpg", ["none.jpg: ", "--weights a.jpg: is an image, not weights"]),
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
