"""The checks of training steps find what they look for; these tests need no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.speed.training_step import build_step, make_batches, stepper
from tests.gpu.step_checks import LIMITS, HostWaits, differences, take_step_on
from tests.helpers.repository import ROOT
from tests.helpers.tiny import TINY_MODEL


@pytest.mark.parametrize("optimizer", LIMITS)
def test_a_wrong_gradient_is_found(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    """The channels of one layer's gradient are in the wrong order."""
    expected = take_step_on("cpu", TINY_MODEL, optimizer, batch_size=2, imgsz=64)

    def build(*args, **settings):
        take_step = build_step(*args, **settings)
        weight = max(take_step.model.parameters(), key=torch.Tensor.numel)
        weight.register_hook(lambda gradient: gradient.flip(0))
        return take_step

    monkeypatch.setattr("tests.gpu.step_checks.build_step", build)
    wrong = differences(take_step_on("cpu", TINY_MODEL, optimizer, batch_size=2, imgsz=64), expected)
    assert wrong["change of the worst tensor"] > LIMITS[optimizer]["change of the worst tensor"]


def test_a_host_wait_is_found_with_its_line():
    take_step = build_step(TINY_MODEL)
    step = stepper(take_step, make_batches(1, 2, 64, torch.device("cpu")))
    step()

    def read(_module, _arguments, out):
        out.total.item()  # READ

    take_step.criterion.register_forward_hook(read)
    with HostWaits("cpu") as waits:
        step()
    number = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# READ" in line)
    (place,) = waits.places
    assert place.startswith(f"_local_scalar_dense at {Path(__file__).relative_to(ROOT)}:{number} from ")
    values = torch.arange(4.0)
    with HostWaits("cpu") as waits:
        values[values > 1]  # by a mask
        values[torch.tensor([0, 1])]
    assert waits.places.total() == 1
