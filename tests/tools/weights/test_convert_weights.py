"""tools.weights: a converted detector is the same, and the documentation shows the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import val
from models.weights.load import load_detector
from models.weights.read import read_weights
from tests.helpers.tiny import write_dataset, write_detector, write_weights
from tools.weights import __main__ as weights_command
from utils.process.main import run_main


@pytest.fixture
def own(tmp_path) -> Path:
    """An own checkpoint."""
    return write_weights(tmp_path / "own.pt", ["light", "dark"], seed=3)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_converting_keeps_the_detector(own, tmp_path, capsys, suffix):
    data = write_dataset(tmp_path / "set", train=8, val=3)
    run_main(weights_command.main, [str(own), str(tmp_path / f"new{suffix}")])
    assert "2 classes, strides 8, 16, 32" in capsys.readouterr().out
    before = load_detector(own)
    after = load_detector(tmp_path / f"new{suffix}")
    assert (after[0].names, after[0].spec, after[1]["imgsz"]) == (before[0].names, before[0].spec, 64)
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(before[0](images), after[0](images)))
    if suffix == ".pt":
        torch.load(tmp_path / "new.pt", weights_only=True)
    words = ["--data", data, "--weights", tmp_path / f"new{suffix}", "--project", tmp_path]
    run_main(val.main, [*map(str, words), "--device", "cpu", "--workers", "0", "--imgsz", "64", "--noplots"])
    assert "AP" in capsys.readouterr().out


def test_the_state_of_a_run_is_not_copied(own, tmp_path):
    """A last.pt that is saved during a validation by other processes (`--eval-ranks`) has tensors of that epoch."""
    state = {"optimizer": {}, "pending": {"weights": torch.zeros(1)}, "ended_by_callback": False}
    description = {"bits": 16, "tile": 32, "metrics": {"metrics/AP": 0.5}}
    last = write_detector(tmp_path / "last.pt", load_detector(own)[0], **state, **description)
    run_main(weights_command.main, [str(last), str(tmp_path / "new.safetensors")])
    run_main(weights_command.main, [str(tmp_path / "new.safetensors"), str(tmp_path / "new.pt")])
    for name in ("new.safetensors", "new.pt"):
        content = read_weights(tmp_path / name).content
        assert {key: content[key] for key in description} == description
        assert content.keys().isdisjoint(state)
