"""The comparison of bits: values that are equal but have other bits differ, and both checkouts read the same data."""

from __future__ import annotations

import pytest
import torch

from benchmarks import same_bits

pytestmark = pytest.mark.benchmarks


def test_values_that_are_equal_but_have_other_bits_differ():
    def content(weight: torch.Tensor, rate: float) -> dict:
        return {"model": {"weight": weight, "count": torch.tensor(3)}, "ema": {}, "optimizer": {"rates": [rate]}}

    zero = content(torch.tensor([0.0, float("nan")]), 0.0)
    assert same_bits.differences(zero, content(torch.tensor([0.0, float("nan")]), 0.0)) == []
    assert same_bits.differences(zero, content(torch.tensor([-0.0, float("nan")]), -0.0)) == [
        ".model.weight",
        ".optimizer.rates[0]",
    ]
    assert same_bits.differences(zero, content(torch.zeros(2, dtype=torch.float64), 0.0)) == [".model.weight"]
