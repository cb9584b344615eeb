"""Checks of the training step find what they look for: wrong gradients, host syncs, overflows."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.command import ROOT
from benchmarks.gpu import equal, overflow, syncs
from benchmarks.speed.training_step import build_step, make_batches
from engine.train.step import TrainStep
from tests.helpers.tiny import TINY_MODEL

pytestmark = pytest.mark.benchmarks
CPU = torch.device("cpu")


@pytest.mark.parametrize("optimizer", ["SGD", "Muon"])
def test_a_wrong_gradient_on_the_device_is_found(optimizer: str):
    """The channels of one layer's gradient are in the wrong order, on the "device" only."""
    options = Namespace(models=[TINY_MODEL], optimizers=[optimizer], device="cpu", batch_size=2, imgsz=64)
    assert len(list(equal.compare_steps(options))) == 1
    built = []

    def wrong_on_device(*args, **kwargs) -> TrainStep:
        take_step = build_step(*args, **kwargs)
        built.append(take_step)
        if len(built) == 2:  # the first one is the CPU's
            weight = max(take_step.model.parameters(), key=torch.Tensor.numel)
            weight.register_hook(lambda gradient: gradient.flip(0))
        return take_step

    with pytest.raises(SystemExit, match="worst tensor"):
        list(equal.compare_steps(options, build=wrong_on_device))


def test_a_host_sync_in_the_step_is_found_with_its_line(monkeypatch: pytest.MonkeyPatch):
    options = Namespace(models=["yolov8n"], optimizers=["SGD"], device="cpu", batch_size=1, imgsz=64)
    assert list(syncs.waits_of_steps(options)) == ["yolov8n SGD: 0 reads of values a step"]
    from models.heads.base import DetectionHead

    build = DetectionHead.build_loss

    def read(_module, _arguments, out):
        out.total.item()  # READ

    def build_reading(*arguments, **settings):
        criterion = build(*arguments, **settings)
        criterion.register_forward_hook(read)
        return criterion

    monkeypatch.setattr(DetectionHead, "build_loss", build_reading)
    lines = []
    with pytest.raises(SystemExit, match="the host waits: yolov8n SGD"):
        lines.extend(syncs.waits_of_steps(options))
    # (extend keeps what came before the exception)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# READ" in text)
    assert lines[0] == "yolov8n SGD: 1 reads of values a step"
    place = f"{Path(__file__).relative_to(ROOT)}:{line}"
    assert lines[1].startswith(f"yolov8n SGD: 1 a step: _local_scalar_dense at {place} from ")
    values = torch.arange(4.0)
    with syncs.ValueReads() as watcher:
        values[values > 1]  # by a mask
        values[torch.tensor([0, 1])]
    assert watcher.places.total() == 1


def test_an_overflow_skips_the_step():
    take_step = build_step(TINY_MODEL, classes=3, amp="off")
    (batch,) = make_batches(1, 2, 64, CPU)
    with overflow.overflowing(take_step):
        take_step([batch], [2], 1)
    take_step([batch], [2], 2)
    assert [values.finite for values in take_step.reader.pop(leave=0)] == [False, True]
