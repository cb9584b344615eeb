"""Makes all ranks save, stop or end after the same step."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from engine.parallel.step_values import StepFlags
from engine.parallel.watchdog import Watchdog
from utils.distributed.context import DistributedContext, max_over_ranks
from utils.errors import INTERRUPTED, REQUEUE, PeerFailure, Stopped, UserError
from utils.program import resume_flag

log = logging.getLogger("lockstep")

STOP_KEY = "stop"  # in the run's store: a rank got a signal to stop while validating
POLL_EVERY_S = 1.0


class Action(enum.IntEnum):
    """What all ranks do next. Of several, the greatest counts."""

    CONTINUE = 0
    SAVE = 1
    END = 2  # take no more steps: the run is done
    STOP = 3  # save and take no more steps: a resumed run continues

    @property
    def saves(self) -> bool:
        """Whether the run is saved at once."""
        return self in (Action.SAVE, Action.STOP)

    @property
    def ends_run(self) -> bool:
        """Whether this process takes no more steps."""
        return self in (Action.END, Action.STOP)


class RunControl:
    """Turns signals and requests of single ranks into actions that all ranks take alike. Every rank has one and makes
    the same calls. ``watchdog`` is entered.

    Requests travel with the sums of a step (`StepFlags`); during validation, when ranks do not communicate, by a key in
    the run's store.
    """

    def __init__(self, ctx: DistributedContext, watchdog: Watchdog) -> None:
        self.is_stopped = False  # whether the ranks have agreed to stop
        self.exit_code = 0  # of the signal that stopped them; 0: none did
        self._ctx, self._watchdog, self._signals = ctx, watchdog, watchdog.signals
        self._wants_save = self._wants_stop = False  # requests of this rank
        self._failure = ""
        self._polled_at, self._validation_stopped = 0.0, False

    @contextmanager
    def training(self, folder: Path) -> Iterator[None]:
        """Around the training: signals are only noted, and the watchdog expects steps."""
        with self._signals.deferred(), self._watchdog.training(folder):
            yield

    @property
    def has_signal(self) -> bool:
        """Whether a signal to stop has reached this rank."""
        return self._signals.stop or self._signals.interrupt

    def request(self, action: Action) -> None:
        """Makes all ranks save once, or stop, after the same step."""
        self._wants_save |= action is Action.SAVE
        self._wants_stop |= action is Action.STOP

    def fail(self, line: str) -> None:
        """Stops the run, which then ends with this error (`finish`)."""
        self._failure, self._wants_stop = line, True

    def flags(self) -> StepFlags:
        """What this rank requests with the step that begins."""
        save, self._wants_save = self._wants_save, False
        return StepFlags(save, self._signals.stop or self._wants_stop, self._signals.interrupt)

    def after_step(self, flags: StepFlags, action: Action, read_newest: Callable[[], StepFlags]) -> Action:
        """What to do after a step, with the flags and the action of all ranks. ``read_newest``: reads the flags of the
        steps that have not been read yet, before a save."""
        self._watchdog.beat()
        if not any(flags) and action is Action.CONTINUE:
            return action
        flags |= read_newest()
        if flags.interrupt:
            return self._stop(INTERRUPTED)
        if flags.stop:  # by a signal to any rank, or else by a request
            return self._stop(max_over_ranks(self._ctx, REQUEUE if self._signals.stop else 0))
        return max(action, Action.SAVE)

    def agree(self) -> Action:
        """At the start and after an epoch: `Action.STOP` if any rank has requested it."""
        return self._stop(0) if max_over_ranks(self._ctx, int(self._wants_stop)) else Action.CONTINUE

    def stops_validation(self) -> bool:
        """Whether a signal has reached this rank or, as of the last poll, another; before each batch of validation."""
        self._watchdog.beat()
        local, store, now = self.has_signal, self._ctx.store, time.monotonic()
        if store is not None and local:
            store.set(STOP_KEY, "")
        elif store is not None and now - self._polled_at >= POLL_EVERY_S:
            self._polled_at = now
            local = store.check([STOP_KEY])
        self._validation_stopped = local
        return local

    def after_validation(self) -> Action:
        code = max_over_ranks(self._ctx, self._signals.code if self._validation_stopped else 0)
        return self._stop(code) if code else Action.CONTINUE

    def finish(self, where: str, last: Path) -> None:
        """After the last step, with how far the run has come, in words, and the checkpoint to resume from. Returns if
        all epochs are done, or if a request has stopped the run.

        Raises Stopped if a signal to any rank has stopped it, and UserError if a hook has failed; on the other ranks
        `PeerFailure`.
        """
        has_failed = max_over_ranks(self._ctx, int(bool(self._failure)))
        if self.exit_code:
            log.info("stopped by a signal after %s; continue with: %s", where, resume_flag(last))
            raise Stopped(self.exit_code)
        if has_failed:
            raise UserError(self._failure) if self._failure else PeerFailure("a callback failed on another rank")
        if self.is_stopped:
            log.info("ended by a callback after %s; continue with: %s", where, resume_flag(last))

    def end_interrupted(self, error: Exception, last: Path) -> NoReturn:
        """After an ``error`` in a step during which a signal has come. A signal to all processes also ends the compiler
        that ``--compile`` has started and the like, for which libraries raise: that is no failure of the run. The state
        may be that of half a step, so nothing is saved. Raises Stopped."""
        checkpoint = f"continue with: {resume_flag(last)}" if last.exists() else "there is no checkpoint yet"
        log.info("stopped by a signal within a step, which is lost (%s); %s", type(error).__name__, checkpoint)
        raise Stopped(self._signals.code) from None

    def _stop(self, exit_code: int) -> Action:
        self.exit_code, self.is_stopped = exit_code, True
        self._watchdog.stop_agreed()
        return Action.STOP
