"""Buffers are converted to one vector and back: equal values, in few kernels."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from benchmarks.speed.training_step import build_step, make_batches
from engine.optim.ema import ModelEma
from engine.optim.model_tensors import copy_from_flat, flatten
from engine.parallel import virtual_ranks as virtual_ranks_module
from engine.train import step as train_step
from tests.helpers.kernel_count import KernelCount


@pytest.mark.parametrize("shapes", [[(3,), (5,)], [(), (), ()], [(2, 3, 2), (4,), (), (1,)], []])
def test_flat_tensors_round_trip(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    flat = flatten(tensors)
    assert flat.tolist() == [value for t in tensors for value in t.reshape(-1).tolist()]
    others = [torch.zeros(shape) for shape in shapes]
    copy_from_flat(flat, others)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others))
    flat.zero_()
    assert all(t.any() for t in tensors)  # a copy


@pytest.mark.parametrize(("virtual_ranks", "most"), [(0, 8), (2, 32)])
def test_statistics_are_saved_and_restored_in_few_kernels(monkeypatch, virtual_ranks, most):
    """A loop would copy each of yolov8n's 114 statistics and 57 counters with a kernel of its own."""
    step = build_step("yolov8n", amp="off", classes=3, virtual_ranks=virtual_ranks)
    count = KernelCount()

    def counted(function):
        def call(*args):
            with count:
                return function(*args)

        return call

    for module in (train_step, virtual_ranks_module):
        for function in (flatten, copy_from_flat):
            monkeypatch.setattr(module, function.__name__, counted(function))
    step(make_batches(1, 2, 64, step.ctx.device), [2], 1)
    assert 0 < count.kernels.total() <= most
    assert not count.waits


def test_ema_equals_a_loop_in_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    ema = ModelEma(model, decay=0.9, tau=5)
    reference = {k: v.double() for k, v in model.state_dict().items()}
    for updates in range(1, 20):
        model(torch.randn(2, 3, 8, 8))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update(updates)
        decay = 0.9 * (1 - math.exp(-updates / 5))
        for key, value in model.state_dict().items():
            reference[key] = decay * reference[key] + (1 - decay) * value.double()
    for key, value in ema.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), reference[key], rtol=1e-5, atol=1e-6)
    assert ema.module[1].num_batches_tracked == 19
    assert not any(p.requires_grad for p in ema.module.parameters())


def test_the_averaged_model_shares_no_memory_with_the_model():
    model = nn.Linear(2, 2)
    ema = ModelEma(model, decay=0.5, tau=1)
    before = copy.deepcopy(ema.module.state_dict())
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(ema.module.weight, before["weight"])
