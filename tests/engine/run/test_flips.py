"""Flips in runs whose classes a flipped image exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import train
from tests.helpers.scripts import SMALL, call
from tests.helpers.tiny import write_dataset, write_model
from utils.files.torch_file import read_checkpoint


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Returns a function that trains on the classes ``names``, and returns the folder of the run."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny.yaml")

    def run(name: str, names: list[str], *more: str) -> Path:
        data = write_dataset(tmp_path / "sets" / name)
        data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | {"names": names}))
        given = ["--data", data, "--model", "tiny.yaml", "--project", "runs", "--name", name, "--epochs", "1"]
        call(train.main, *SMALL, *given, *more)
        return Path("runs", name)

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "last.pt")["model"]


def fliplr(folder: Path) -> float:
    return yaml.safe_load((folder / "settings.yaml").read_text())["hyp"]["fliplr"]


def test_horizontal_flips_are_off_for_left_and_right_unless_asked_for(trained):
    pair = ["left light", "Right_light"]
    chosen = trained("chosen", pair)
    assert "--set fliplr=0.5" in (chosen / "train.log").read_text()
    assert fliplr(chosen) == 0
    # The same bits as for classes without such names, with the same flips.
    other = trained("other", ["light", "dark"], "--set", "fliplr=0")
    torch.testing.assert_close(weights(chosen), weights(other), rtol=0, atol=0)
    call(train.main, "--resume", chosen / "last.pt", "--epochs", "2")  # a run that continues keeps them off
    assert fliplr(chosen) == 0


@pytest.mark.parametrize("more", [["--set", "fliplr=0.5"], ["--hyp", "own.yaml"]])
def test_flips_that_are_asked_for_are_kept_and_warned_of(trained, more):
    Path("own.yaml").write_text("fliplr: 0.5\n")
    folder = trained("own", ["left light", "Right_light"], *more)
    assert "--set fliplr=0 " in (folder / "train.log").read_text()
    assert fliplr(folder) == 0.5
    if "--hyp" in more:
        call(train.main, "--resume", folder / "last.pt", "--epochs", "2")
        assert fliplr(folder) == 0.5
