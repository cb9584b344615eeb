from __future__ import annotations

import torch
from ranks import run_ranks
from torch import nn

from engine.parallel import average_buffers
from engine.sync_bn import convert_sync_bn


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 2, 1), nn.BatchNorm2d(2)
    ).double()


def _run(model, images):
    images = images.clone().requires_grad_()
    model(images).sin().sum().backward()
    return images.grad


def _share(ctx, cuts):
    model = convert_sync_bn(_network())
    images = torch.randn(7, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    grad = _run(model, images.tensor_split(cuts)[ctx.rank])
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    keys = sorted(model.state_dict())
    return grad, [p.grad for p in model.parameters()], dict(model.state_dict()), keys


def test_equals_one_process_with_the_whole_batch():
    model = _network()
    images = torch.randn(7, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = _run(model, images)
    results = run_ranks(3, _share, [5, 5])  # 5, 0 and 2 images: one rank has none
    torch.testing.assert_close(torch.cat([r[0] for r in results]), expected, rtol=1e-10, atol=1e-12)
    for grads, state in ((r[1], r[2]) for r in results):
        for ours, theirs in zip(grads, model.parameters()):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-10, atol=1e-12)
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)
    assert results[0][3] == sorted(model.state_dict())


def _average(ctx):
    model = nn.BatchNorm2d(3)
    model.running_mean.fill_(ctx.rank)
    average_buffers(model, ctx)
    return model.running_mean


def test_buffers_are_averaged_over_ranks():
    for mean in run_ranks(2, _average):
        assert mean.tolist() == [0.5, 0.5, 0.5]
