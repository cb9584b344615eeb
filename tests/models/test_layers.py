"""Layers compared with the formula of their paper, or with the layer of torch that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layers.conv import Upsample
from models.layers.gelan import ADown
from models.modules import eval_mode, is_parallel, unwrap
from models.weights.layouts import ungrouped


@pytest.mark.parametrize("size", [(3, 5), (1, 1)])
def test_nearest_upsampling_on_a_cpu_equals_torchs(size):
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    weight = torch.randn(2, 4, 2 * size[0], 2 * size[1])
    results = []
    for module in (Upsample(None, 2), torch.nn.Upsample(None, 2)):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        (out * weight).sum().backward()
        results.append((out.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_the_downsampling_of_yolov9_equals_its_formula() -> None:
    x = torch.randn(2, 6, 8, 10)
    mean = (x[..., :-1, :-1] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., 1:, 1:]) / 4
    down = ADown(6, 4).eval()
    pooled = nn.functional.max_pool2d(mean[:, 3:], 3, 2, 1)
    torch.testing.assert_close(down(x), torch.cat((down.cv1(mean[:, :3]), down.cv2(pooled)), 1))


def test_an_expanded_grouped_kernel_gives_the_same_convolution() -> None:
    kernel = torch.randn(8, 3, 3, 3, dtype=torch.float64)
    x = torch.randn(2, 12, 5, 5, dtype=torch.float64)
    expected = nn.functional.conv2d(x, kernel, groups=4)
    torch.testing.assert_close(nn.functional.conv2d(x, ungrouped(kernel, 12)), expected)


def test_parallel_wrappers_are_recognized_and_removed():
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    assert is_parallel(wrapped)
    assert not is_parallel(model)
    assert unwrap(wrapped) is model
    assert unwrap(model) is model


def test_eval_mode_leaves_frozen_modules_frozen():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout())
    model.train()
    model[0].eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]
