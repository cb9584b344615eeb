"""Makes all ranks save the run, or end it, after the same step; prints the stacks of a stall."""

from __future__ import annotations

import enum
import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from utils.distributed.context import DistributedContext, all_objects, max_over_ranks
from utils.errors import PeerFailure, Stopped, UserError
from utils.logger import get_logger
from utils.process.signals import StopSignals

STALL_S = 600.0  # time without a step after which all stacks are printed
STOP_KEY = "stop"  # in the run's store: exit code of a signal that a rank got while validating
POLL_EVERY_S = 1.0


class Action(enum.Enum):
    """The action that every rank takes next."""

    CONTINUE = enum.auto()
    SAVE = enum.auto()  # save the run at once
    STOP = enum.auto()  # save it, and take no more steps: a resumed run continues here


class StepFlags(NamedTuple):
    """Requests of any rank to all ranks. They are reduced together with the sums of a step, so they cost nothing and
    all ranks read them after the same step."""

    save: bool = False
    stop: bool = False  # for a signal, or a callback

    def __or__(self, other: StepFlags) -> StepFlags:
        return StepFlags(*(mine or theirs for mine, theirs in zip(self, other)))

    def to_tensor(self, like: Tensor) -> Tensor:
        """Returns 1 for each flag that is set and 0 for the others (F,), made on the device without a host sync."""
        values = like.new_zeros(len(self))
        for number, is_set in enumerate(self):
            if is_set:
                values[number].fill_(1)
        return values


NO_FLAGS = StepFlags()


class RunControl:
    """Turns signals and requests of single ranks into actions that all ranks take together. Every rank creates one and
    makes the same calls.

    Requests travel with the sums of a step (`StepFlags`); during validation, when ranks do not communicate, by a key in
    the run's store.
    """

    def __init__(self, ctx: DistributedContext, signals: StopSignals, *, ended_by_callback: bool = False) -> None:
        """``ended_by_callback``: a callback has ended the run in an earlier start, and this one takes no steps."""
        self.exit_code = 0  # exit code of the signal that has stopped the ranks, or 0
        self.has_stopped = False  # the ranks have saved and stopped for a signal or a request
        self.stopped_by_callback = ended_by_callback  # by `request_stop`; no callback has failed
        self._ctx = ctx
        self._signals = signals
        self._flags = NO_FLAGS  # requests of all ranks that are not followed yet
        # Requests of this rank:
        self._save_requested = False
        self._stop_requested = False
        self._failure = ""  # message of a callback that failed on this rank
        self._cause: BaseException | None = None  # the error behind it
        self._received = 0  # exit code of a signal to a process outside of this group, or 0
        self._polled_at = 0.0

    @property
    def _code(self) -> int:
        """Exit code of the signal that this rank follows, or 0."""
        return self._signals.code or self._received

    @contextmanager
    def training(self) -> Iterator[None]:
        """Defers signals within the block, and expects a step or a validation batch every `STALL_S` seconds."""
        self._beat()
        try:
            with self._signals.deferred():
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        """Lets faulthandler print the stacks of all threads to standard error if this is not called again in time."""
        faulthandler.dump_traceback_later(STALL_S, repeat=True, file=2)

    def receive(self, code: int) -> None:
        """Treats the signal of a process outside of this group as this rank's. ``code``: its exit code."""
        self._received = code

    def request_save(self) -> None:
        """Makes all ranks save once, after the same step."""
        self._save_requested = True

    def request_stop(self) -> None:
        """Makes all ranks save and stop after the same step, or at the end of the epoch."""
        self._stop_requested = True

    def fail(self, message: str, cause: BaseException | None = None) -> None:
        """Stops the run, which ends with this error: `raise_if_aborted` raises it or, if ``on_end`` of a callback
        fails, `late_failure` returns it."""
        self._failure = message
        self._cause = cause
        self._stop_requested = True

    def agree_on_abort(self) -> bool:
        """Returns True if the ranks have stopped at a signal, or if a callback has failed on any of them: another
        command does the rest. Every rank must call this."""
        return self.exit_code != 0 or self._agree_on_failure()

    def flags(self) -> StepFlags:
        """Returns this rank's requests for the step that begins."""
        flags = StepFlags(save=self._save_requested, stop=self._stop_requested or self._code != 0)
        self._save_requested = False  # a save is requested once, a stop in every step until the run ends
        return flags

    def add_flags(self, flags: StepFlags) -> None:
        """Adds the requests of all ranks in a step whose values have been read."""
        self._flags |= flags

    def after_step(self) -> Action:
        """Returns the action that the ranks have requested."""
        self._beat()
        flags = self._flags
        self._flags = NO_FLAGS
        if flags.stop:
            return self.agree()
        return Action.SAVE if flags.save else Action.CONTINUE

    def agree(self) -> Action:
        """Returns `Action.STOP` if a signal has reached any rank, or any has requested a stop. Called at the start,
        after an epoch, and after a step in which a rank has asked for it."""
        code = max_over_ranks(self._ctx, self._code)
        if not code:
            if not max_over_ranks(self._ctx, int(self._stop_requested)):
                return Action.CONTINUE
            self.stopped_by_callback |= not self._agree_on_failure()
        self._stop(code)
        return Action.STOP

    def should_stop(self) -> bool:
        """Returns whether a signal has reached this rank or, as of the last second, another one. Called before each
        batch of a validation, and while a rank waits for its scores."""
        self._beat()
        store = self._ctx.store
        now = time.monotonic()
        is_stopped = self._code != 0
        with suppress(dist.DistError):  # torchrun has ended, and the store with it: this process gets SIGTERM
            if store is not None and is_stopped:
                store.set(STOP_KEY, str(self._code))
            elif store is not None and now - self._polled_at >= POLL_EVERY_S:
                self._polled_at = now
                is_stopped = store.check([STOP_KEY])
        return is_stopped

    def stops_after_validation(self) -> bool:
        """Returns whether a signal has reached any rank during the validation, or the wait for its scores: these may be
        missing."""
        code = max_over_ranks(self._ctx, self._code)
        if code:
            self._stop(code)
        return code != 0

    def raise_if_aborted(self, position: str, continuation: str) -> None:
        """Raises an error if the run is aborted (`agree_on_abort`), also by a signal since the ranks have agreed last.
        Returns if all epochs are done, or if a callback has ended the run. Every rank must call this.

        Args:
            position: such as ``after 2 epochs``.
            continuation: what to do next, such as ``continue with: --resume last.pt``.

        Raises Stopped if a signal to any rank has stopped the run, UserError if a callback has failed on this rank, and
        `PeerFailure` if one has failed on another rank only.
        """
        # A collective, whatever the code is: a rank that ended sooner than the one that still writes last.pt would make
        # the launcher kill that one.
        self.exit_code = max_over_ranks(self._ctx, self.exit_code or self._code)
        if self.exit_code:
            get_logger().info("stopped by a signal %s; %s", position, continuation)
            raise Stopped(self.exit_code)
        if self._agree_on_failure():
            if not self._failure:
                raise PeerFailure("a callback failed on another rank")
            raise _failure_error(self._failure, continuation) from self._cause

    def late_failure(self, continuation: str) -> UserError | None:
        """Returns the error of a callback's ``on_end``, on any rank; None if there is none, and on all ranks but 0.
        Every rank must call this. ``continuation``: see `raise_if_aborted`."""
        messages = [message for message in all_objects(self._ctx, self._failure) if message]
        if not messages or not self._ctx.is_main:
            return None
        error = _failure_error(messages[0], continuation)
        error.__cause__ = self._cause
        return error

    def _agree_on_failure(self) -> bool:
        return max_over_ranks(self._ctx, int(bool(self._failure))) > 0

    def _stop(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.has_stopped = True


def _failure_error(message: str, continuation: str) -> UserError:
    return UserError(f"{message}; when it is fixed, {continuation}")
