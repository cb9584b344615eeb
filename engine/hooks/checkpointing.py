"""Saves checkpoints at intervals of time within an epoch, and before a validation."""

from __future__ import annotations

import os
import time

from engine.hooks.hook import Action, Epoch, Hook, Training
from utils.distributed.context import max_over_ranks

SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training


class Checkpoints(Hook):
    """Saves within an epoch every ``every_s`` seconds by the clock of rank 0; 0: at the ends of epochs only.

    A new run in the folder of an earlier one (``--exist-ok``) replaces last.pt first, then best.pt and results.csv. As
    long as last.pt is from the earlier run, so are the others, and the earlier run can continue. The earlier run's
    best.pt stays until the new one has a best epoch.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self._is_requested = False
        self._must_replace_last = False  # last.pt is still from an earlier run

    def start(self, trainer: Training) -> Action | None:
        """Saves at once if the run continues from a file other than last.pt, because it then has no last.pt of its own,
        or if a callback had ended it: last.pt must not say so while the run trains on."""
        started_from = trainer.run.started_from
        if started_from is None:
            replaces_earlier = trainer.checkpointer.replaces_earlier
            self._must_replace_last = bool(max_over_ranks(trainer.ctx, int(replaces_earlier)))
            return None
        is_last = os.path.realpath(started_from.path) == os.path.realpath(trainer.checkpointer.last)
        return Action.SAVE if started_from.ended_by_callback or not is_last else None

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

    def after_last_step(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Saves the steps of the first epoch if last.pt may be from an earlier run."""
        return Action.SAVE if self._must_replace_last else None

    def record(self, trainer: Training, epoch: Epoch) -> None:
        """Waits until last.pt is from this run, before other hooks replace files of an earlier one, and before
        results.csv gets a second epoch, since a run cannot resume without last.pt."""
        is_ahead = trainer.ctx.is_main and epoch.number > 1 and not trainer.checkpointer.last.is_file()
        if self._must_replace_last or is_ahead:
            trainer.checkpointer.flush()
            self._must_replace_last = False

    def after_save(self) -> None:
        self._saved_at = time.monotonic()
        self._is_requested = False

    def _age_s(self) -> float:
        """Returns the seconds since the last save."""
        return time.monotonic() - self._saved_at
