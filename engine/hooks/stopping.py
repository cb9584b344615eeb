"""Early stopping and the time limit, which end a run before its last epoch."""

from __future__ import annotations

import time

from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.optim.schedule import epochs_in_time
from utils.distributed.context import broadcast_object
from utils.logger import get_logger
from utils.strings import counted


class EarlyStopping(Hook):
    """Ends the run after ``patience`` epochs without a better ``fitness``. ``val_every``: epochs between two
    validations of the run."""

    def __init__(self, patience: int, fitness: str, *, val_every: int) -> None:
        self._patience = patience
        self._fitness = fitness
        self._val_every = val_every

    def report(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Decides when the epoch has its scores: a run may continue with an epoch that is not scored yet."""
        progress = trainer.progress
        if not progress.stops_early(self._patience, epochs=trainer.epochs, val_every=self._val_every):
            return None
        get_logger().info(
            "no better %s in %s (best: epoch %d): stopped early (--patience %d)",
            self._fitness,
            counted(progress.epoch - progress.best_epoch, "epoch"),
            progress.best_epoch,
            self._patience,
        )
        return Action.END


class TimeLimit(Hook):
    """``--time``: after the steps of each epoch, decides by the clock of rank 0 how many epochs the run has."""

    decides_next_epoch = True

    def __init__(self, hours: float) -> None:
        self._hours = hours
        self._steps_done_at = 0.0
        self._between_s = 0.0  # seconds of validation and saving between two epochs

    def before_epoch(self, trainer: Training) -> None:
        if self._steps_done_at:
            self._between_s = time.monotonic() - self._steps_done_at

    def after_last_step(self, trainer: Training, epoch: Epoch) -> None:
        self._steps_done_at = time.monotonic()
        epochs = epochs_in_time(epoch.number, trainer.seconds() + self._between_s, self._hours * 3600)
        epochs = broadcast_object(trainer.ctx, epochs)
        if epochs != trainer.epochs:
            get_logger().info("--time %g: %s", self._hours, counted(epochs, "epoch"))
            trainer.set_epochs(epochs)
