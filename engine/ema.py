"""Exponential moving average of weights and buffers, kept on every rank so that it needs no broadcast."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


class ModelEma:
    """A frozen copy of ``model`` that follows it. The decay ramps up so that early weights are soon forgotten:
    ``decay * (1 - exp(-updates / tau))``, updates counted from 1."""

    def __init__(self, model: nn.Module, *, decay: float, tau: float) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.tau = decay, tau
        self._follower = list(self.module.state_dict().values())

    def decay_at(self, updates: int) -> float:
        return self.decay * (1 - math.exp(-updates / self.tau))

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Moves towards ``model`` (unwrapped); ``updates`` counts the optimiser steps taken, this one included."""
        leader = list(model.state_dict().values())
        floats = [(f, m) for f, m in zip(self._follower, leader) if f.is_floating_point()]
        others = [(f, m) for f, m in zip(self._follower, leader) if not f.is_floating_point()]
        torch._foreach_lerp_(*_columns(floats), 1 - self.decay_at(updates))
        if others:
            torch._foreach_copy_(*_columns(others))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [a for a, _ in pairs], [b for _, b in pairs]
