"""How many batches make a step, how many steps an epoch and a run."""

from __future__ import annotations

from dataclasses import dataclass

from utils.config import TrainConfig


@dataclass(frozen=True)
class Pace:
    """How batches become steps of the optimiser."""

    accumulate: int  # batches a step; the last one of an epoch may have fewer
    steps: int  # an epoch
    total: int  # of the run


def pace_of(config: TrainConfig, epoch_batches: int) -> Pace:
    """The pace of a run whose epochs have ``epoch_batches`` on each rank."""
    accumulate = max(config.accumulate, round(config.nominal_batch / config.batch_size), 1)
    steps = -(-epoch_batches // accumulate)
    return Pace(accumulate, steps, steps * config.epochs)
