"""The loss of a head with a one-to-many and a one-to-one branch (see models/heads/base.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.losses.base import Criterion
from utils.structures import LossOutput, Targets


class DualAssignmentLoss(Criterion):
    """The one-to-many branch's loss plus ``gain`` times the one-to-one branch's (YOLOv10, Wang et al. 2024).

    In the paper each branch's sum is divided by that branch's own target scores. Here both are divided by the
    one-to-many branch's, because a loss has one normalizer; ``gain`` stands for the ratio of the two, measured as about
    2 on a fresh model and 6 on a trained one. No parameter receives gradients of both losses, so the gain only acts as
    a learning rate of the one-to-one layers; optimizers that normalize gradients (Muon, Adam) hardly depend on it.
    """

    def __init__(self, many: Criterion, one: Criterion, *, gain: float):
        super().__init__()
        self.many, self.one, self.gain = many, one, gain
        self.names = (*many.names, *(f"{name}_one" for name in one.names))

    def compile_terms(self) -> None:
        self.many.compile_terms()
        self.one.compile_terms()

    def set_closing(self, closing: bool) -> None:
        self.many.set_closing(closing)
        self.one.set_closing(closing)

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: ``raw`` and ``teacher_maps`` of the one-to-many branch, then those of the one-to-one branch."""
        levels = len(raw) // 2
        of_many, of_one = (teacher_maps[:levels], teacher_maps[levels:]) if teacher_maps else (None, None)
        many, one = self.many(raw[:levels], targets, of_many), self.one(raw[levels:], targets, of_one)
        parts = torch.cat((many.parts, self.gain * one.parts))
        return LossOutput(many.total + self.gain * one.total, many.normalizer, parts)
