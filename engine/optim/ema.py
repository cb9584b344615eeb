"""The exponential moving average of a model's weights, which is validated and saved."""

from __future__ import annotations

import copy
import math
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

ModelT = TypeVar("ModelT", bound=nn.Module)


class ModelEma(Generic[ModelT]):
    """Keeps the exponential moving average of ``model`` (unwrapped), whose tensors may only be changed in place.

    Every rank updates its own average, so no step communicates it. The decay ramps up, so that early weights are soon
    forgotten: ``decay * (1 - exp(-updates / tau))``, with updates counted from 1. Integer tensors are copied.
    """

    def __init__(self, model: ModelT, *, tau: float, decay: float = 0.9999) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        self._tau = tau
        self._float_averages: list[Tensor] = []
        self._float_sources: list[Tensor] = []
        self._integer_copies: list[Tensor] = []
        self._integer_sources: list[Tensor] = []
        for average, source in zip(self.module.state_dict().values(), model.state_dict().values()):
            if average.is_floating_point():
                self._float_averages.append(average)
                self._float_sources.append(source)
            else:
                self._integer_copies.append(average)
                self._integer_sources.append(source)

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Moves the average towards the model. ``updates`` counts optimizer steps, including this one."""
        decay = self._decay * (1 - math.exp(-updates / self._tau))
        torch._foreach_lerp_(self._float_averages, self._float_sources, 1 - decay)
        if self._integer_copies:
            torch._foreach_copy_(self._integer_copies, self._integer_sources)
