"""Fewer epochs than ``--epochs``: early stopping and a limit of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.checkpoint.checkpoint import Progress
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.optim.schedule import epochs_in_time
from utils.distributed.collectives import broadcast_object
from utils.strings import counted

log = logging.getLogger("lockstep")


class EarlyStopping(Hook):
    """Ends the run after so many epochs without a better one.

    Args:
        patience: epochs.
        fitness: what is compared, for readers.
        is_validated: whether an epoch of so many is (`Validation.is_due`).
    """

    def __init__(self, patience: int, fitness: str, is_validated: Callable[[int, int], bool]) -> None:
        self._patience, self._fitness, self._is_validated = patience, fitness, is_validated

    def start(self, trainer: Training) -> Action:
        return self._decide(trainer)

    def after_epoch(self, trainer: Training, epoch: Epoch) -> Action:
        return self._decide(trainer)

    def _decide(self, trainer: Training) -> Action:
        progress = trainer.progress
        is_validated = progress.batch == 0 and self._is_validated(progress.epoch, trainer.epochs)
        is_over = is_validated and progress.epoch < trainer.epochs and has_stalled(progress, self._patience)
        if not is_over or progress.best_epoch < 0:
            return Action.CONTINUE
        epochs, best = counted(progress.epoch - progress.best_epoch, "epoch"), progress.best_epoch
        log.info("no better %s in %s (best: epoch %d): stopped early", self._fitness, epochs, best)
        return Action.END


def has_stalled(progress: Progress, patience: int, *, epoch: int | None = None) -> bool:
    """Whether ``epoch``, or the newest completed one, is the last for which ``patience`` waits, unless it is better."""
    return 0 < patience <= (progress.epoch if epoch is None else epoch) - progress.best_epoch


class TimeLimit(Hook):
    """``--time``: decides by rank 0's clock after an epoch's steps how many epochs the run has."""

    decides_next_epoch = True

    def __init__(self, hours: float) -> None:
        self._hours = hours
        self._steps_done_at, self._rest_s = 0.0, 0.0  # what follows the steps of an epoch takes so long

    def before_epoch(self, trainer: Training) -> Action:
        if self._steps_done_at:
            self._rest_s = time.monotonic() - self._steps_done_at
        return Action.CONTINUE

    def after_steps(self, trainer: Training, epoch: Epoch) -> Action:
        self._steps_done_at = time.monotonic()
        epochs = epochs_in_time(epoch.number, trainer.seconds() + self._rest_s, self._hours * 3600)
        epochs = broadcast_object(trainer.ctx, epochs)
        if epochs != trainer.epochs:
            log.info("--time %g: %s", self._hours, counted(epochs, "epoch"))
            trainer.set_epochs(epochs)
        return Action.CONTINUE
