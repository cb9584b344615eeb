"""The moving average of a model, `ModelEma`."""

from __future__ import annotations

import math

import torch
from torch import nn

from engine.optim.ema import ModelEma


def test_ema_equals_a_loop_in_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    ema = ModelEma(model, decay=0.9, tau=5)
    reference = {k: v.double() for k, v in model.state_dict().items()}
    for updates in range(1, 20):
        model(torch.randn(2, 3, 8, 8))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update(updates)
        decay = 0.9 * (1 - math.exp(-updates / 5))
        for key, value in model.state_dict().items():
            reference[key] = decay * reference[key] + (1 - decay) * value.double()
    for key, value in ema.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), reference[key], rtol=1e-5, atol=1e-6)
    assert ema.module[1].num_batches_tracked == 19
    assert not any(p.requires_grad for p in ema.module.parameters())
