"""Muon on a CPU, and as on a GPU: matrices of several shapes are padded to a common one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.optim import muon
from engine.optim.muon import Muon, iteration_dtype, orthogonalize

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


def test_the_type_of_the_iteration_changes_only_rounding(monkeypatch):
    """A CPU without instructions for bfloat16 iterates in float32, which is ten times as fast there."""
    x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    found = {}
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(muon, "cpu_multiplies_bf16", lambda fast=fast: fast)
        iteration_dtype.cache_clear()
        assert iteration_dtype("cpu") == dtype
        assert iteration_dtype("cuda") == torch.bfloat16
        found[dtype] = orthogonalize(x.to(dtype))
    iteration_dtype.cache_clear()
    exact = x.double() / x.double().norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = exact @ exact.mT
        exact = 3.4445 * exact + (-4.7750 * gram + 2.0315 * gram @ gram) @ exact
    errors = [(found[dtype] - exact).norm() / exact.norm() for dtype in found]
    assert errors[1] < 1e-5 < errors[0] < 0.03


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
