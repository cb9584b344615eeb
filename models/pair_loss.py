"""The loss of a pair of heads: one criterion each, added up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.loss_terms import Criterion
from utils.structures import LossOutput


class PairLoss(Criterion):
    """The one-to-many branch's loss plus ``gain`` times the one-to-one branch's (YOLOv10, Wang et al. 2024).

    In the paper each branch's sum is divided by that branch's own target scores. Here both are divided by the
    one-to-many branch's, for a loss has one normaliser; ``gain`` stands for the ratio of the two, which was found to be
    about 2 on a fresh model and 6 on a trained one. It weighs no gradient against another, since no parameter serves
    both branches' losses: it is a learning rate of the one-to-one layers, which an optimiser that normalises gradients
    (Muon, Adam) hardly sees.
    """

    def __init__(self, many: Criterion, one: Criterion, *, gain: float):
        super().__init__()
        self.many, self.one, self.gain = many, one, gain
        self.names = (*many.names, *(f"{name}_one" for name in one.names))

    def compile_terms(self) -> None:
        self.many.compile_terms()
        self.one.compile_terms()

    def set_refining(self, refining: bool) -> None:
        self.many.set_refining(refining)
        self.one.set_refining(refining)

    def forward(
        self, raw: Sequence[Tensor], targets: Tensor, max_targets: int, host_targets: np.ndarray | None = None
    ) -> LossOutput:
        """Args: ``raw`` the maps of the one-to-many branch, then those of the one-to-one branch; the rest as there."""
        levels = len(raw) // 2
        many = self.many(raw[:levels], targets, max_targets, host_targets)
        one = self.one(raw[levels:], targets, max_targets, host_targets)
        parts = torch.cat((many.parts, self.gain * one.parts))
        return LossOutput(many.total + self.gain * one.total, many.normaliser, parts)
