"""Layers compared with the formula of their paper, or with the layer of torch that they replace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.layers.conv import Upsample
from models.layers.csp import Attention
from models.modules import eval_mode, is_parallel, unwrap


def test_attention_equals_the_papers_formula() -> None:
    """Compared with softmax(Q'K / sqrt d) in float64; channels are ordered by head, then q, k, v."""
    torch.manual_seed(0)
    attention = Attention(8, heads=2).double().eval()
    x = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    parts = attention.qkv(x).reshape(2, 2, 2 + 2 + 4, 15)
    values = torch.zeros(2, 8, 15).double()
    mixed = torch.zeros(2, 8, 15).double()
    for image in range(2):
        for head in range(2):
            query, key, value = parts[image, head].split((2, 2, 4))
            weights = (query.T @ key / math.sqrt(2)).softmax(-1)  # (query cell, key cell)
            mixed[image, 4 * head : 4 * head + 4] = value @ weights.T
            values[image, 4 * head : 4 * head + 4] = value
    expected = attention.proj((mixed.view_as(x)) + attention.pe(values.view_as(x)))
    torch.testing.assert_close(attention(x), expected)


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
