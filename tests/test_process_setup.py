"""What a training process chooses before it builds anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from engine.process_setup import open_folder, prepare_process
from engine.run import Run
from utils.config import Hyperparameters, TrainConfig
from utils.distributed import DistributedContext

CPU = DistributedContext.single("cpu")
GPU = replace(CPU, device=torch.device("cuda", 0))  # no kernel runs on it here


@pytest.fixture(autouse=True)
def _restored_kernels() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    yield
    torch.backends.cudnn.benchmark = before[0]
    torch.use_deterministic_algorithms(before[1])


def run_with(folder: Path, **settings) -> Run:
    return Run(folder, TrainConfig(**settings), Hyperparameters(), folder / "last.pt", None, [])


@pytest.mark.parametrize(
    ("settings", "searches"),
    [({}, True), ({"quad": True}, True), ({"rect": True}, False), ({"multi_scale": True}, False),
     ({"deterministic": True}, False)],
)  # fmt: skip
def test_cudnn_searches_for_kernels_where_pictures_have_one_size(tmp_path, settings, searches):
    torch.backends.cudnn.benchmark = not searches
    prepare_process(GPU, run_with(tmp_path, **settings))
    assert torch.backends.cudnn.benchmark == searches


def test_the_settings_are_stored_with_the_run(tmp_path):
    run = run_with(tmp_path, rect=True)
    prepare_process(CPU, run)
    with open_folder(CPU, run):
        pass
    stored = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert stored["config"]["rect"] is True
    assert stored["hyp"]["box"] == 7.5
