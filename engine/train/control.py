"""When the ranks of a run save and stop: all of them, after the same step."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from engine.train.step import StepFlags
from utils.config.settings import TrainConfig
from utils.distributed.collectives import max_over_ranks
from utils.distributed.context import DistributedContext
from utils.machine.stop_signals import INTERRUPTED, REQUEUE, StopSignals

STOP_KEY = "stop"  # in the run's store: a rank was asked to stop while validating
POLL_EVERY_S = 1.0
SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training


class StopCoordinator:
    """Turns this rank's signals and the save intervals into decisions that all ranks take alike.

    What a rank requests travels with the sums of its step (`StepFlags`), so that all ranks read it after the same step.
    Ranks do not communicate during validation; there a key in the run's store carries the request.

    Args:
        signals: of this process, entered.
    """

    def __init__(self, ctx: DistributedContext, signals: StopSignals, config: TrainConfig) -> None:
        self._ctx, self._signals = ctx, signals
        self._save_every_s = config.save_minutes * 60 if ctx.is_main else 0.0  # one clock decides for all
        self._save_every_updates = config.save_steps
        self._saved_at, self._save_requested = time.monotonic(), False
        self._polled_at = 0.0
        self._end_requested = False

    def deferred(self) -> AbstractContextManager[None]:
        """A block in which signals are only noted."""
        return self._signals.deferred()

    def flags(self) -> StepFlags:
        """What this rank requests with the step that begins. A save is requested once, until it is done."""
        save = not self._save_requested and 0 < self._save_every_s <= time.monotonic() - self._saved_at
        self._save_requested |= save
        return StepFlags(save, self._signals.stop or self._end_requested, self._signals.interrupt)

    def request_end(self) -> None:
        """Requests, from this rank, the end of training: with the next step's flags, or by `agree_to_end`."""
        self._end_requested = True

    def agree_to_end(self) -> bool:
        """Whether any rank has requested the end. Every rank calls it."""
        return max_over_ranks(self._ctx, int(self._end_requested)) > 0

    def save_is_due(self, flags: StepFlags, updates: int) -> bool:
        """Whether the ranks save after ``updates`` steps, given the flags of all of them."""
        return any(flags) or (self._save_every_updates > 0 and updates % self._save_every_updates == 0)

    def save_is_due_before_validation(self) -> bool:
        """Whether the ranks save an epoch's steps before its validation, which may be killed or fail. Every rank calls
        it."""
        least_s = min(self._save_every_s, SAVE_BEFORE_VALIDATION_S)
        is_due = self._save_every_s > 0 and time.monotonic() - self._saved_at >= least_s
        return max_over_ranks(self._ctx, int(is_due)) > 0

    def saved(self) -> None:
        self._saved_at, self._save_requested = time.monotonic(), False

    def exit_code(self, flags: StepFlags) -> int:
        """The code with which the ranks exit after the step that had ``flags``; 0: no signal stops them. Every rank
        calls it."""
        if flags.interrupt:
            return INTERRUPTED
        return max_over_ranks(self._ctx, REQUEUE if self._signals.stop else 0) if flags.stop else 0

    def stop_requested(self) -> bool:
        """Whether a signal has reached this rank or, as of the last poll, another.

        Called before each batch of validation.
        """
        local, store = self._signals.stop or self._signals.interrupt, self._ctx.store
        if store is None:
            return local
        if local:
            store.set(STOP_KEY, "")
            return True
        now = time.monotonic()
        if now - self._polled_at < POLL_EVERY_S:
            return False
        self._polled_at = now
        return store.check([STOP_KEY])

    def exit_code_after_validation(self, *, stopped: bool) -> int:
        """As `exit_code`. Every rank calls it. ``stopped``: whether `stop_requested` ended this rank's validation."""
        return max_over_ranks(self._ctx, self._signals.code if stopped else 0)
