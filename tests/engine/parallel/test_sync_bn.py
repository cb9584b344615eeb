"""Batch norm over several processes, with our own operations and as on GPUs: torch's CUDA kernels are replaced by
formulas that follow their source code.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from engine.parallel import sync_bn
from engine.parallel.sync_bn import convert_sync_bn
from models.detector import build_detector
from tests.helpers.ranks import run_ranks
from utils.distributed.groups import sync_bn_group


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 2, 1), nn.BatchNorm2d(2)
    ).double()


def _run(model, images):
    images = images.clone().requires_grad_()
    model(images).sin().sum().backward()
    return images.grad


def _stats(x, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.mean((0, 2, 3)), (wide.var((0, 2, 3), correction=0) + eps).rsqrt()


def _gather_stats(x, means, inverses, running_mean, running_var, momentum, eps, counts):
    """Works like the kernel: one process after another, with an integer running count."""
    average = torch.zeros_like(means[0])
    squares = torch.zeros_like(means[0])
    number = 0
    for mean, inverse, count in zip(means, inverses, counts.tolist()):
        variance = ((1 / inverse) ** 2 - eps) * count
        factor = 1 / (number + count)
        squares += variance + (mean - average) ** 2 * number * count * factor
        average = number * factor * average + count * factor * mean
        number += int(count)
    running_mean.copy_((1 - momentum) * running_mean + momentum * average)
    running_var.copy_((1 - momentum) * running_var + momentum * squares / (number - 1))
    return average, (squares / number + eps).rsqrt()


def _normalized(x, weight, bias, mean, inverse, eps):
    return ((x - mean[:, None, None]) * (inverse * weight)[:, None, None] + bias[:, None, None]).to(x.dtype)


def _backward_reduce(grad, x, mean, inverse, weight, *wanted):
    wide = grad.to(mean)
    products = (wide * (x - mean[:, None, None])).sum((0, 2, 3))
    sums = wide.sum((0, 2, 3))
    return sums, products, products * inverse, sums.clone()


def _backward(grad, x, mean, inverse, weight, sums, products, counts):
    assert counts.dtype == torch.int32
    number = counts.sum()
    slope = (x - mean[:, None, None]) * (inverse**2 * products / number)[:, None, None]
    return ((grad - (sums / number)[:, None, None] - slope) * (inverse * weight)[:, None, None]).to(grad.dtype)


_KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _normalized,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward,
}


def _as_on_a_gpu() -> None:
    """Replaces the kernels in this process, which is used for nothing else."""
    warnings.simplefilter("error", FutureWarning)  # for deprecated functions
    for name, kernel in _KERNELS.items():
        setattr(torch, name, kernel)
    sync_bn._has_kernels = lambda device: True


def _share(ctx, cuts):
    model = convert_sync_bn(_network())
    images = torch.randn(7, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    grad = _run(model, images.tensor_split(cuts)[ctx.rank])
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    return grad, [p.grad for p in model.parameters()], dict(model.state_dict())


def _shares(ctx):
    """With our operations and with the kernels; 5, 0 and 2 images, or 0, 4 and 3: one rank has none."""
    shares = []
    for replace_kernels in (lambda: None, _as_on_a_gpu):
        replace_kernels()
        shares += [_share(ctx, cuts) for cuts in ([5, 5], [0, 4])]
    return shares


def test_synchronized_statistics_equal_one_process_with_the_whole_batch():
    model = _network()
    images = torch.randn(7, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = _run(model, images)
    for results in zip(*run_ranks(3, _shares)):
        torch.testing.assert_close(torch.cat([r[0] for r in results]), expected, rtol=1e-10, atol=1e-12)
        for _, grads, state in results:
            for ours, theirs in zip(grads, model.parameters()):
                torch.testing.assert_close(ours, theirs.grad, rtol=1e-10, atol=1e-12)
            assert state.keys() == model.state_dict().keys()
            for key, value in model.state_dict().items():
                if value.is_floating_point():
                    torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


def _with_an_empty_group(ctx):
    """In groups of two, with our operations and with the kernels: rank 0 has one image, and all others none."""
    group = sync_bn_group(ctx, 2)
    images = torch.randn(1, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for replace_kernels in (lambda: None, _as_on_a_gpu):
        replace_kernels()
        model = convert_sync_bn(_network(), group)
        _run(model, images if ctx.rank == 0 else images[:0])
        results.append(([p.grad for p in model.parameters()], dict(model.state_dict())))
    return results


def test_a_group_without_an_image_keeps_its_statistics():
    """As with --sync-bn 2 on four processes, and a last batch of one image."""
    untouched, model = _network(), _network()
    _run(model, torch.randn(1, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    for rank, results in enumerate(run_ranks(4, _with_an_empty_group)):
        expected = (model if rank < 2 else untouched).state_dict()
        for grads, state in results:
            assert rank == 0 or not any(grad.any() for grad in grads)
            for key in ("1.running_mean", "1.running_var", "4.running_mean", "4.running_var"):
                torch.testing.assert_close(state[key], expected[key], rtol=1e-10, atol=1e-12)


def test_conversion_keeps_keys_and_evaluation():
    """Parameters and buffers are the same objects; evaluation, also fused, does not change."""
    model = build_detector("yolov8n", 3, seed=1)
    keys = list(model.state_dict())
    held = [*model.parameters(), *model.buffers()]
    images = torch.rand(1, 3, 64, 64)
    expected = [level.detach() for level in model.eval()(images)]
    fused = [level.detach() for level in model.fuse()(images)]
    assert convert_sync_bn(model.train()) is model
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], held, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.eval()(images), expected))
    assert all(torch.equal(a, b) for a, b in zip(model.fuse()(images), fused))
