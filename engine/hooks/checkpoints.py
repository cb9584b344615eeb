"""When a run is saved, other than after each epoch."""

from __future__ import annotations

import time

from engine.hooks.hook import Action, Hook, Training
from utils.distributed.collectives import max_over_ranks

SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training


class Checkpoints(Hook):
    """Saves by the clock of rank 0.

    Args:
        every_s: seconds between checkpoints; 0: there are none within an epoch.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self._is_requested = False

    def start(self, trainer: Training) -> Action:
        """A run that is resumed from another file than its own last.pt has none yet."""
        is_elsewhere = trainer.run.continues_elsewhere(trainer.checkpointer.last)
        return Action.SAVE if is_elsewhere else Action.CONTINUE

    def after_step(self, trainer: Training) -> Action:
        """Raises UserError if an earlier write has failed."""
        trainer.checkpointer.check()
        if trainer.ctx.is_main and not self._is_requested and 0 < self._every_s <= self._age_s():
            trainer.control.request(Action.SAVE)  # one clock decides for all
            self._is_requested = True
        return Action.CONTINUE

    def before_validation(self, trainer: Training) -> Action:
        """An epoch's steps are saved before its validation, which may be killed or fail, if they took long."""
        least_s = min(self._every_s, SAVE_BEFORE_VALIDATION_S)
        is_due = trainer.ctx.is_main and 0 < least_s <= self._age_s()
        return Action.SAVE if max_over_ranks(trainer.ctx, int(is_due)) else Action.CONTINUE

    def saved(self) -> None:
        self._saved_at, self._is_requested = time.monotonic(), False

    def _age_s(self) -> float:
        return time.monotonic() - self._saved_at
