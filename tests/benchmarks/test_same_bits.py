"""The comparison of bits: values that are equal but have other bits differ, and both checkouts read the same data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import same_bits

pytestmark = pytest.mark.benchmarks

# Stands in for the train.py of another checkout: it needs the data set and its own modules.
TRAIN = """
import sys
from pathlib import Path
from own_module import NAME

flags = dict(zip(sys.argv, sys.argv[1:]))
folder = Path(flags["--project"], flags["--name"])
folder.mkdir()
(folder / NAME).write_text(Path(flags["--data"]).read_text())
"""


def write_checkout(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "own_module.py").write_text("NAME = 'data.txt'")
    return folder


def test_values_that_are_equal_but_have_other_bits_differ():
    def content(weight: torch.Tensor, rate: float) -> dict:
        return {"model": {"weight": weight, "count": torch.tensor(3)}, "ema": {}, "optimizer": {"rates": [rate]}}

    zero = content(torch.tensor([0.0, float("nan")]), 0.0)
    assert same_bits.differences(zero, content(torch.tensor([0.0, float("nan")]), 0.0)) == []
    assert same_bits.differences(zero, content(torch.tensor([-0.0, float("nan")]), -0.0)) == [
        ".model.weight",
        ".optimizer.rates[0]",
    ]
    assert same_bits.differences(zero, content(torch.zeros(2, dtype=torch.float64), 0.0)) == [".model.weight"]


def test_another_checkout_reads_data_that_is_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = write_checkout(tmp_path / "before")
    here = tmp_path / "here"
    (here / "set").mkdir(parents=True)
    (here / "set" / "data.yaml").write_text("the data set")
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.chdir(here)
    run = same_bits.train(runs, same_bits.Setup(1, root=before), "--data", "set/data.yaml")
    assert (run / "data.txt").read_text() == "the data set"
