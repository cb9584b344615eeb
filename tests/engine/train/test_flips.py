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
        given = ["--data", data, "--model", "tiny.yaml", "--project", "runs", "--name", name, "--epochs", "2"]
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
    flipped = trained("flipped", pair, "--set", "fliplr=0.5")
    assert "--set fliplr=0 " in (flipped / "train.log").read_text()
    assert fliplr(flipped) == 0.5
    # The same bits as for classes without such names, with the same flips.
    for folder, settings in ((chosen, ["--set", "fliplr=0"]), (flipped, [])):
        other = trained(f"other {folder.name}", ["light", "dark"], *settings)
        torch.testing.assert_close(weights(folder), weights(other), rtol=0, atol=0)
    for folder, probability in ((chosen, 0), (flipped, 0.5)):  # a run that continues keeps them
        call(train.main, "--resume", folder / "last.pt", "--epochs", "3")
        assert fliplr(folder) == probability


def test_a_file_of_hyper_parameters_is_as_explicit_as_set(trained):
    Path("own.yaml").write_text("fliplr: 0.5\n")
    folder = trained("own", ["left light", "Right_light"], "--hyp", "own.yaml")
    assert fliplr(folder) == 0.5
    call(train.main, "--resume", folder / "last.pt", "--epochs", "3")
    assert fliplr(folder) == 0.5


def test_vertical_flips_of_up_and_down_are_warned_of(trained):
    folder = trained("ud", ["up", "down"], "--set", "flipud=0.5")
    assert "--set flipud=0 " in (folder / "train.log").read_text()
    assert fliplr(folder) == 0.5
