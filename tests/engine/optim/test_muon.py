"""Muon on a CPU, and as on a GPU: matrices of several shapes are padded to a common one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.optim import muon
from engine.optim.muon import Muon

SHAPES = [
    (8, 3, 3, 3), (16, 8, 1, 1), (8, 16, 1, 1), (16, 1, 3, 3), (5, 24), (24, 5), (16, 8, 3, 3), (8, 16), (1, 7), (8, 8),
]  # fmt: skip
OPTIONS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


@pytest.fixture(params=[False, True], ids=["exact", "padded"])
def padded(request, monkeypatch) -> None:
    monkeypatch.setattr(muon, "pads_matrices", lambda device: request.param)


def make_parameters(channels_last: bool = True) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if channels_last:
        tensors = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
    return [nn.Parameter(t) for t in tensors]


def set_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.usefixtures("padded")
def test_muon_equals_torchs_on_matrices_and_flattened_kernels(channels_last):
    ours = make_parameters(channels_last)
    start = [p.detach().flatten(1).clone() for p in ours]
    theirs = [nn.Parameter(matrix.clone()) for matrix in start]
    a = Muon(ours, **OPTIONS)
    b = torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    for seed in range(10):
        set_gradients(ours, seed)
        for p, q in zip(ours, theirs):
            q.grad = p.grad.flatten(1).clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start):
        # Both iterate in bfloat16, whose rounding differs between one product and a batch of them.
        assert (p.flatten(1) - q).norm() < 0.01 * (p.flatten(1) - s).norm()


@pytest.mark.usefixtures("padded")
def test_parameters_without_a_gradient_do_not_change():
    parameters = make_parameters()
    absent = (0, 4, 5, 9)
    optimizer = Muon(parameters, **OPTIONS)
    set_gradients(parameters, 0)
    optimizer.step()
    before = [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for p in parameters]
    set_gradients(parameters, 1)
    for n in absent:
        parameters[n].grad = None
    optimizer.step()
    for n, (p, (weight, momentum)) in enumerate(zip(parameters, before)):
        assert torch.equal(p, weight) == (n in absent)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum) == (n in absent)
