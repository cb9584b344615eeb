"""Muon on a CPU, and as on a GPU: matrices of several shapes are padded to a common one."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

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


def take_steps(optimizer: Muon, parameters: list[nn.Parameter], seeds, bad: int | None = None) -> None:
    for seed in seeds:
        set_gradients(parameters, seed)
        if seed == bad:
            for p in parameters:
                p.grad.fill_(float("nan"))
        optimizer.found_inf = torch.tensor(float(seed == bad))
        optimizer.step()


def plain_muon(parameters: list[Tensor], momenta: list[Tensor], *, bad: bool) -> None:
    """One step of each parameter in the reference formulation: matrices of one shape in one batch, without padding."""
    bad = torch.tensor(bad)
    keep = 1 - bad.to(torch.float32)
    gradients = [torch.where(bad, m, p.grad) for m, p in zip(momenta, parameters)]
    for m, g in zip(momenta, gradients):
        m.lerp_(g, 1 - OPTIONS["momentum"])
    updates = [torch.lerp(g, m, OPTIONS["momentum"]) for g, m in zip(gradients, momenta)]
    rows = [(u.permute(0, 2, 3, 1) if u.dim() == 4 else u).flatten(1) for u in updates]
    wide = [r.mT if r.shape[0] > r.shape[1] else r for r in rows]
    by_shape = defaultdict(list)
    for number, matrix in enumerate(wide):
        by_shape[matrix.shape].append(number)
    for (_, columns), members in by_shape.items():
        x = torch.stack([wide[n] for n in members]).to(iteration_dtype("cpu"))
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        moves = x.float() * ((keep * OPTIONS["lr"]) * (0.2 * columns**0.5))
        for n, move in zip(members, moves):
            p = parameters[n]
            move = move.mT if rows[n].shape[0] > rows[n].shape[1] else move
            if p.dim() == 4:
                a, b, c, d = p.shape
                move = move.reshape(a, c, d, b).permute(0, 3, 1, 2)
            p.mul_(1 - keep * (OPTIONS["lr"] * OPTIONS["weight_decay"]))
            p.sub_(move.reshape(p.shape))


@pytest.mark.parametrize("channels_last", [True, False])
def test_on_a_cpu_the_bits_equal_the_plain_formulation(channels_last):
    ours = make_parameters(channels_last)
    plain = make_parameters(channels_last)
    momenta = [torch.zeros_like(p) for p in plain]
    optimizer = Muon(ours, **OPTIONS)
    for seed in range(4):
        take_steps(optimizer, ours, [seed], bad=2)
        set_gradients(plain, seed)
        with torch.no_grad():
            plain_muon(plain, momenta, bad=seed == 2)
    for a, b, momentum in zip(ours, plain, momenta):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], momentum)


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


@pytest.mark.parametrize("shapes", [[(8, 32)], [(32, 8), (8, 30), (16, 16), (30, 7)]])
@pytest.mark.usefixtures("padded")
def test_muon_equals_torch_on_matrices(shapes):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    a = Muon(ours, **OPTIONS)
    b = torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start):
        # Both iterate in bfloat16, whose rounding differs between one product and a batch of them.
        assert (p - q).norm() < 0.01 * (p - s).norm()


@pytest.mark.usefixtures("padded")
def test_parameters_without_a_gradient_do_not_change():
    parameters = make_parameters()
    absent = (0, 4, 5, 9)
    optimizer = Muon(parameters, **OPTIONS)
    take_steps(optimizer, parameters, [0])
    before = [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for p in parameters]
    set_gradients(parameters, 1)
    for n in absent:
        parameters[n].grad = None
    optimizer.step()
    for n, (p, (weight, momentum)) in enumerate(zip(parameters, before)):
        assert torch.equal(p, weight) == (n in absent)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum) == (n in absent)


def test_gradients_may_have_another_memory_layout():
    """A channels_last kernel with a contiguous gradient."""
    a = make_parameters()
    b = make_parameters()
    for parameters in (a, b):
        set_gradients(parameters, 0)
    for p in b:
        p.grad = p.grad.contiguous()
    for parameters in (a, b):
        Muon(parameters, **OPTIONS).step()
    assert all(torch.equal(p, q) for p, q in zip(a, b))
