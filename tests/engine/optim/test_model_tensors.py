"""Tensors are converted to one vector and back: equal values, in few kernels."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed.training_step import build_step, make_batches
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


@pytest.mark.parametrize(("virtual_ranks", "max_kernels"), [(0, 8), (2, 32)])
def test_statistics_are_saved_and_restored_in_few_kernels(monkeypatch, virtual_ranks, max_kernels):
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
    assert 0 < count.kernels.total() <= max_kernels
    assert not count.waits
