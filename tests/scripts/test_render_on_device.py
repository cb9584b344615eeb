"""Training with images rendered on the device (here the CPU), as users start it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import train
from data.loading.prefetcher import Prefetcher
from tests.helpers.same_content import same_content
from tests.helpers.scripts import SMALL, run_python
from tests.helpers.tiny import write_dataset, write_model
from tests.scripts.test_train import rows
from utils.entrypoint import run_main
from utils.files.checkpoint import read_checkpoint

HYP = ["--set", "mixup=0.5", "close_mosaic=1", "close_scale=1"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("world")
    data, model = write_dataset(root / "set"), write_model(root / "tiny.yaml")
    return ["--data", str(data), "--model", str(model), *SMALL, "--epochs", "2", "--render-on", "device"]


def trained(flags: list[str], folder: Path, *more: str) -> dict:
    """The checkpoint of a run in this process."""
    run_main(train.main, [*flags, "--project", str(folder), *more, *HYP])
    return read_checkpoint(folder / "exp" / "last.pt")


def test_cache_prefetching_and_resuming_do_not_change_a_bit(world, tmp_path, monkeypatch):
    shared = ["--virtual-ranks", "2", "--nominal-batch", "8", "--image-weights"]
    expected = trained(world, tmp_path / "one", *shared, "--cache", "device", "--save-period", "1")
    monkeypatch.setattr("engine.train.trainer.Prefetcher", partial(Prefetcher, ahead=True))
    same_content(expected, trained(world, tmp_path / "two", *shared))
    middle = tmp_path / "one" / "exp" / "epoch1.pt"
    last = tmp_path / "one" / "exp" / "last.pt"
    last.rename(tmp_path / "moved.pt")
    run_main(train.main, ["--resume", str(middle), "--cache", "ram"])
    same_content(expected, read_checkpoint(last))
    assert len(rows(tmp_path / "one" / "exp" / "results.csv")) == 2


@pytest.mark.slow
def test_processes_and_workers_do_not_change_a_bit(world, tmp_path):
    flags = [*world, "--virtual-ranks", "2", "--multi-scale"]
    expected = trained(flags, tmp_path / "one", "--cache", "device")
    run_python("train.py", *flags, "--workers", "1", "--project", tmp_path / "two", *HYP, torchrun=2)
    same_content(expected, read_checkpoint(tmp_path / "two" / "exp" / "last.pt"))
