"""The parts of losses: closed forms, loops, and torch's own functions on dense targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.box_coding import flatten_levels
from models.layers.ops import sparse_cross_entropy, split_rows
from models.losses.base import class_weights
from tests.models.losses.cases import REG_MAX, raw_maps


@pytest.mark.parametrize("weights", [None, torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)], ids=["", "weighted"])
def test_sparse_cross_entropy_equals_torch_on_dense_targets(weights):
    generator = torch.Generator().manual_seed(0)
    logits = (30 * torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)).requires_grad_()
    cells = torch.tensor([[1, 4, 4], [0, 6, 2]])
    targets = torch.rand(2, 3, 3, generator=generator, dtype=torch.float64)
    targets[0, 2] = 0  # an unused slot may contain any cell
    dense = torch.zeros_like(logits).scatter_add(1, cells[..., None].expand(-1, -1, 3), targets)
    reference = torch.nn.functional.binary_cross_entropy_with_logits(logits, dense, weights, reduction="sum")
    value = sparse_cross_entropy(logits, cells, targets, weights)
    torch.testing.assert_close(value, reference, rtol=1e-14, atol=0)
    ours, theirs = (torch.autograd.grad(3 * loss, logits)[0] for loss in (value, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_splitting_maps_into_rows_equals_autograd(dtype, layout):
    raw = [level.detach().to(dtype, memory_format=layout).requires_grad_() for level in raw_maps("anchor_free", 2)]
    width = 4 * REG_MAX
    ours = split_rows(raw, width)
    theirs = flatten_levels(raw).split((width, 3), -1)
    weights = [torch.randn(part.shape).to(part) for part in theirs]
    assert all(part.is_contiguous() and torch.equal(part, other) for part, other in zip(ours, theirs))
    for a, b in zip(*(torch.autograd.grad(parts, raw, weights) for parts in (ours, theirs))):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_class_weights_are_inverse_frequencies_with_mean_one(power):
    counts = np.array([400, 0, 25, 100])
    weights = class_weights(counts, power).numpy()
    assert weights[1] == 1  # no boxes: nothing is known
    seen = weights[counts > 0]
    np.testing.assert_allclose(seen.mean(), 1, rtol=1e-6)
    np.testing.assert_allclose(seen * [400**power, 25**power, 100**power] / (seen[0] * 400**power), 1, rtol=1e-5)
    assert class_weights(np.array([9]), power).tolist() == [1]
    assert class_weights(np.array([0, 0]), power).tolist() == [1, 1]
