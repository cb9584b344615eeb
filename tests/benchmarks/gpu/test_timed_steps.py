"""The steps and losses that benchmarks/gpu times are those of train.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu import compiled, profile
from benchmarks.speed.training_step import build_step, loss_pass, make_batches
from engine.train.step import TrainStep
from tests.helpers.tiny import TINY_MODEL

pytestmark = pytest.mark.benchmarks
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "timed",
    [
        lambda options, build: profile.kernels_of(options, TINY_MODEL, 2, "SGD", build=build),
        lambda options, build: profile.first_steps(options, build=build),
        lambda options, build: profile.loss_shares(options, build=build),
        lambda options, build: compiled.time_steps(options, is_compiled=False, build=build),
    ],
    ids=["kernels", "first steps", "loss", "compiled or not"],
)
def test_timed_models_are_built_for_their_batch_size(timed: Callable):
    """Otherwise cuDNN would not search for the fastest kernels, as it does in a long training."""
    searched = []

    def building(*args, **settings) -> TrainStep:
        step = build_step(*args, classes=3, **settings)
        searched.append(step.settings.benchmark_images)
        return step

    options = {"model": TINY_MODEL, "models": [TINY_MODEL], "boxes": [3], "batch_size": 2, "imgsz": 64}
    list(timed(Namespace(**options, device="cpu", compile=False), building))
    assert searched == [2]


def test_the_measured_loss_equals_the_loss_of_the_step():
    """The reference is the criterion's value for the maps of that batch. The model is left without a gradient."""
    take_step = build_step(TINY_MODEL, classes=3, amp="off")
    (batch,) = make_batches(1, 2, 64, CPU, 3, like_coco=True)
    totals = []
    take_step.criterion.register_forward_hook(lambda _module, _args, out: totals.append(float(out.total.detach())))
    loss = loss_pass(take_step, batch)
    loss()
    loss()
    assert totals[0] == totals[1] == totals[2]
    assert all(parameter.grad is None for parameter in take_step.model.parameters())
