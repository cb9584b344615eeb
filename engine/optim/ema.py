"""Exponential moving average (EMA) of weights and buffers, updated on every rank, so that no step sends it."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


class ModelEma:
    """The EMA of ``model``. Its decay ramps up, so that early weights are soon forgotten:
    ``decay * (1 - exp(-updates / tau))``, with updates counted from 1."""

    def __init__(self, model: nn.Module, *, decay: float, tau: float) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.tau = decay, tau
        self._averages = list(self.module.state_dict().values())
        self._source: nn.Module | None = None  # the model that the pairs belong to
        self._floats: tuple[list[Tensor], list[Tensor]] = ([], [])  # averages, sources
        self._others: tuple[list[Tensor], list[Tensor]] = ([], [])

    def decay_at(self, updates: int) -> float:
        return self.decay * (1 - math.exp(-updates / self.tau))

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Updates the average by ``model`` (unwrapped); ``updates`` counts optimizer steps, including this one.

        The tensors of the model are looked up once (2 ms); from then on they may only be changed in place.
        """
        if model is not self._source:
            self._pair_with(model)
        torch._foreach_lerp_(*self._floats, 1 - self.decay_at(updates))
        if self._others[0]:
            torch._foreach_copy_(*self._others)

    def _pair_with(self, model: nn.Module) -> None:
        pairs = list(zip(self._averages, model.state_dict().values(), strict=True))
        self._floats = _columns([pair for pair in pairs if pair[0].is_floating_point()])
        self._others = _columns([pair for pair in pairs if not pair[0].is_floating_point()])
        self._source = model

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [a for a, _ in pairs], [b for _, b in pairs]
