"""Saves checkpoints at intervals of time within an epoch, and before a validation."""

from __future__ import annotations

import time

from engine.hooks.hook import Action, Hook, Training
from utils.distributed.context import max_over_ranks

SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training


class Checkpoints(Hook):
    """Saves within an epoch every ``every_s`` seconds by the clock of rank 0; 0: at the ends of epochs only."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self._is_requested = False

    def start(self, trainer: Training) -> Action | None:
        """Saves at once if a callback had ended the run: last.pt must not say so while the run trains on."""
        started_from = trainer.run.started_from
        return Action.SAVE if started_from is not None and started_from.header.ended_by_callback else None

    def after_step(self, trainer: Training) -> None:
        """Raises UserError if an earlier write has failed."""
        trainer.checkpointer.check()
        if trainer.ctx.is_main and not self._is_requested and 0 < self._every_s <= self._age_s():
            trainer.control.request_save()  # one clock decides for all
            self._is_requested = True

    def before_validation(self, trainer: Training) -> Action | None:
        """Saves the steps of an epoch, if they took long: a validation, or a wait for its scores, may be killed or
        fail."""
        min_age_s = min(self._every_s, SAVE_BEFORE_VALIDATION_S)
        is_due = trainer.ctx.is_main and 0 < min_age_s <= self._age_s()
        return Action.SAVE if max_over_ranks(trainer.ctx, int(is_due)) else None

    def after_save(self) -> None:
        self._saved_at = time.monotonic()
        self._is_requested = False

    def _age_s(self) -> float:
        """Returns the seconds since the last save."""
        return time.monotonic() - self._saved_at
