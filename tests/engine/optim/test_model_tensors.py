"""Tensors are converted to one vector and back: equal values, in few kernels."""

from __future__ import annotations

import pytest
import torch

from engine.optim.model_tensors import copy_from_flat, flatten


@pytest.mark.parametrize("shapes", [[(2, 3, 2), (4,), (), (1,)], []])
def test_flat_tensors_round_trip(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    flat = flatten(tensors)
    assert flat.tolist() == [value for t in tensors for value in t.reshape(-1).tolist()]
    others = [torch.zeros(shape) for shape in shapes]
    copy_from_flat(flat, others)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others))
    flat.zero_()
    assert all(t.any() for t in tensors)  # a copy
