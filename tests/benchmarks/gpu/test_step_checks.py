"""Checks of the training step find what they look for: wrong gradients, host syncs, overflows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from benchmarks.command import ROOT
from benchmarks.gpu import equal, overflow, syncs
from benchmarks.speed.training_step import build_step
from engine.train.step import TrainStep
from tests.helpers.tiny import TINY_MODEL

pytestmark = pytest.mark.benchmarks
TINY = {"device": "cpu", "batch_size": 2, "imgsz": 64}


def problems_of(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line.startswith("!")]


@pytest.mark.parametrize("optimizer", ["SGD", "Muon"])
def test_a_wrong_gradient_on_the_device_is_found(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    """The channels of one layer's gradient are in the wrong order, on the "device" only."""
    built = []

    def build(*args, **kwargs) -> TrainStep:
        take_step = build_step(*args, **kwargs)
        built.append(take_step)
        if len(built) == 4:  # two steps are equal; the third one is the CPU's
            weight = max(take_step.model.parameters(), key=torch.Tensor.numel)
            weight.register_hook(lambda gradient: gradient.flip(0))
        return take_step

    monkeypatch.setattr(equal, "build_step", build)
    for is_wrong in (False, True):
        lines = list(equal.compare_steps(**TINY, models=[TINY_MODEL], optimizers=[optimizer]))
        assert any("worst tensor" in line for line in problems_of(lines)) == is_wrong
        assert is_wrong or len(lines) == 1


def test_a_host_sync_in_the_step_is_found_with_its_line(monkeypatch: pytest.MonkeyPatch):
    cases = {"models": ["yolov8n"], "optimizers": ["SGD"]}
    assert list(syncs.waits_of_steps(**TINY, **cases)) == ["yolov8n SGD: 0 reads of values a step"]
    from models.heads.base import DetectionHead

    build = DetectionHead.build_loss

    def read(_module, _arguments, out):
        out.total.item()  # READ

    def build_reading(*arguments, **settings):
        criterion = build(*arguments, **settings)
        criterion.register_forward_hook(read)
        return criterion

    monkeypatch.setattr(DetectionHead, "build_loss", build_reading)
    lines = list(syncs.waits_of_steps(**TINY, **cases))
    number = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# READ" in text)
    assert lines[0] == "yolov8n SGD: 1 reads of values a step"
    place = f"{Path(__file__).relative_to(ROOT)}:{number}"
    assert lines[1].startswith(f"yolov8n SGD: 1 a step: _local_scalar_dense at {place} from ")
    assert problems_of(lines) == ["! the host waits: yolov8n SGD"]
    values = torch.arange(4.0)
    places: Counter[str] = Counter()
    with syncs.ValueReads(places):
        values[values > 1]  # by a mask
        values[torch.tensor([0, 1])]
    assert places.total() == 1


def test_an_overflow_skips_one_step():
    lines = list(overflow.check_overflow(**TINY, model=TINY_MODEL, optimizers=["SGD"]))
    assert len(lines) == 1
    assert lines[0].endswith("SGD: 8 of 9 steps taken")
