"""--weights in the scripts: hostile files end with one line and run no code, names need the network, and the weights
determine the model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import detect
import train
import val
from tests.helpers.hostile_files import write_hostile_files
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_weights
from tools.weights import __main__ as weights_command
from utils.files.torch_file import read_checkpoint
from utils.process.main import run_main

KINDS = (
    "runs a command", "bare pickle that runs a command", "huge tensor", "huge tensor, safetensors",
    "huge header, safetensors", "truncated", "zip bomb", "not a checkpoint",
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A tiny data set, an own checkpoint with its classes."""
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=8, val=3)
    write_weights(root / "own.pt", ["light", "dark"], seed=3)
    return root


def commands(inputs: Path, weights: Path | str, out: Path) -> dict[str, tuple]:
    data = str(inputs / "set" / "data.yaml")
    return {
        "train": (train.main, "--data", data, "--weights", weights, "--project", out, *SMALL),
        "val": (val.main, "--data", data, "--weights", weights, "--project", out, "--device", "cpu", "--workers", "0"),
        "detect": (detect.main, "--source", inputs / "set" / "images" / "val", "--weights", weights, "--project", out),
        "weights": (weights_command.main, weights, out / "converted.safetensors"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_file_is_refused_in_one_line_by_every_script(inputs, tmp_path, capsys, kind):
    marker = tmp_path / "ran"
    path, message = write_hostile_files(tmp_path, marker)[kind]
    for name, command in commands(inputs, path, tmp_path / "out").items():
        line = error_of(capsys, *command)
        assert line.startswith(f"error: {path}: "), (name, line)
        assert message in line, name
    assert not marker.exists()
    assert not list((tmp_path / "out").rglob("*.pt"))


@pytest.mark.parametrize("script", ["train", "val", "detect", "weights"])
def test_an_uncached_name_with_offline_is_one_line(inputs, tmp_path, capsys, script):
    line = error_of(capsys, *commands(inputs, "yolo26n", tmp_path)[script], "--offline")
    assert "yolo26n: not on this machine, and --offline is set; put https://github.com/" in line
    assert line.endswith("lockstep/weights/yolo26n.pt")


def test_training_without_model_uses_the_model_of_the_weights(inputs, tmp_path, capsys):
    command = commands(inputs, inputs / "own.pt", tmp_path)["train"]
    run_main(command[0], [*map(str, command[1:]), "--epochs", "1"])
    out = capsys.readouterr().out
    assert f"{inputs / 'own.pt'}: " in out
    assert "tensors loaded" in out
    content = read_checkpoint(tmp_path / "exp" / "last.pt")
    assert content["model_spec"] == read_checkpoint(inputs / "own.pt")["model_spec"]
