"""The exponential moving average of a model's weights, which is validated and saved."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn


class ModelEma:
    """The exponential moving average of ``model`` (unwrapped), whose tensors may only be changed in place. Every rank
    updates its own, so no step sends it. The decay ramps up, so that early weights are soon forgotten:
    ``decay * (1 - exp(-updates / tau))``, with updates counted from 1."""

    def __init__(self, model: nn.Module, *, decay: float, tau: float) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay, self._tau = decay, tau
        pairs = list(zip(self.module.state_dict().values(), model.state_dict().values()))
        self._floats = [pair for pair in pairs if pair[0].is_floating_point()]  # average, source
        self._others = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """``updates`` counts optimizer steps, including this one."""
        decay = self._decay * (1 - math.exp(-updates / self._tau))
        torch._foreach_lerp_(*zip(*self._floats), 1 - decay)
        if self._others:
            torch._foreach_copy_(*zip(*self._others))
