"""When all ranks save, validate and end a run: all of them, after the same step."""

from __future__ import annotations

import enum
import logging
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.checkpoint.checkpoint import Progress
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.run import Run
from engine.optim.schedule import epochs_in_time
from engine.parallel.watchdog import Watchdog
from engine.train.callbacks import Callbacks
from engine.train.step import StepFlags, StepValues
from utils.distributed.collectives import broadcast_object, max_over_ranks
from utils.distributed.context import DistributedContext
from utils.errors import INTERRUPTED, REQUEUE, PeerFailure, Stopped, UserError, one_line
from utils.files.checked_open import open_direct
from utils.strings import counted

log = logging.getLogger("lockstep")

STOP_KEY = "stop"  # in the run's store: a rank was asked to stop while validating
POLL_EVERY_S = 1.0
SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training


class Action(enum.Enum):
    """What all ranks do now."""

    CONTINUE = enum.auto()
    SAVE = enum.auto()
    STOP = enum.auto()  # once the state is saved


class RunControl:
    """Turns signals, requests of hooks, clocks and results into decisions that all ranks take alike. Every rank has one
    and makes the same calls.

    What a rank requests travels with the sums of its step (`StepFlags`), so that all ranks read it after the same step.
    Ranks do not communicate during validation; there a key in the run's store carries the request. The watchdog ends
    processes that wait for one that has died.

    Args:
        progress: the run's position and its best result.
        callbacks: the user's hooks, which are called here.
        watchdog: of this process, entered.

    Attributes:
        epochs: of the whole run; `fit_into_time` changes it.
        is_stopped: whether the ranks have agreed to end before the last epoch is done.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        run: Run,
        progress: Progress,
        checkpointer: Checkpointer,
        callbacks: Callbacks,
        watchdog: Watchdog,
    ) -> None:
        self.ctx, self.run, self.progress, self.checkpointer = ctx, run, progress, checkpointer
        self.epochs, self.is_stopped = run.config.epochs, False
        self._callbacks, self._watchdog, self._signals = callbacks, watchdog, watchdog.signals
        self._exit_code = 0
        self._save_every_s = run.config.save_minutes * 60 if ctx.is_main else 0.0  # one clock decides for all
        earlier_s = run.checkpoint.run.get("seconds", 0.0) if run.checkpoint else 0.0
        self._started = time.monotonic() - earlier_s
        self._saved_at, self._save_requested = time.monotonic(), False
        self._polled_at, self._validation_stopped = 0.0, False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the training: signals are only noted, and the watchdog expects steps. Checkpoints are written when the
        block ends, however it does."""
        with self._signals.deferred(), self._watchdog.training(self.run.folder, self.run.config.stall_minutes * 60):
            try:
                yield
            finally:
                self.checkpointer.wait()

    def seconds(self) -> float:
        """How long the run has trained, in all its processes."""
        return time.monotonic() - self._started

    def started(self) -> Action:
        """Before the first step."""
        return self._call_and_agree("on_start")

    def flags(self) -> StepFlags:
        """What this rank requests with the step that begins. A save is requested once, until it is done."""
        save = not self._save_requested and 0 < self._save_every_s <= time.monotonic() - self._saved_at
        self._save_requested |= save
        return StepFlags(save, self._signals.stop or self._callbacks.stop_requested, self._signals.interrupt)

    def after_step(self, flags: StepFlags, read_newest: Callable[[], StepFlags]) -> Action:
        """After each step. Raises UserError if an earlier save has failed.

        Args:
            flags: of all ranks, as far as they have been read.
            read_newest: reads those of the remaining steps; called before a save.
        """
        self._watchdog.beat()
        self.checkpointer.check()
        self._callbacks.call("on_step")
        every = self.run.config.save_steps
        if not any(flags) and not (every and self.progress.updates % every == 0):
            return Action.CONTINUE
        flags |= read_newest()
        if flags.interrupt:
            return self._stop(INTERRUPTED)
        if flags.stop:  # by a signal to any rank, or else by a hook
            return self._stop(max_over_ranks(self.ctx, REQUEUE if self._signals.stop else 0))
        return Action.SAVE

    def check_finite(self, values: StepValues) -> None:
        """Names the files of a step that was skipped. Raises UserError if one step after another was."""
        progress = self.progress
        progress.bad_steps = 0 if values.finite else progress.bad_steps + 1
        if values.finite:
            return
        if not values.local_finite:
            listed = self.run.folder / f"nonfinite_rank{self.ctx.rank}.txt"
            with open(listed, "a", encoding="utf-8", errors="surrogateescape", opener=open_direct) as file:
                file.write(one_line(f"epoch {progress.epoch}: {' '.join(values.paths)}") + "\n")
            log.warning("non-finite loss, step skipped; its files: %s", " ".join(values.paths))
        elif self.ctx.is_main:
            log.warning("non-finite gradient (norm %s), step skipped", values.grad_norm)
        if progress.bad_steps >= self.run.config.max_bad_steps:
            self.checkpointer.wait()
            last = self.checkpointer.last
            what = f"{last} holds the last good weights: resume" if last.exists() else "No checkpoint yet: start again"
            raise UserError(
                f"{counted(progress.bad_steps, 'step')} in a row not finite; stopped. {what} with a lower lr0 "
                "(--set lr0=...) or with --amp off"
            )

    def fit_into_time(self, epoch_end_s: float) -> bool:
        """With ``--time``, decides by rank 0's clock after an epoch's steps how many epochs the run has. Returns
        whether it is another number than before.

        Args:
            epoch_end_s: how long validation and saving take.
        """
        hours, before = self.run.config.time, self.epochs
        if hours:
            epochs = epochs_in_time(self.progress.epoch + 1, self.seconds() + epoch_end_s, hours * 3600)
            self.epochs = broadcast_object(self.ctx, epochs)
        if self.epochs == before:
            return False
        log.info("--time %g: %s", hours, counted(self.epochs, "epoch"))
        self._callbacks.state.epochs = self.epochs
        self.checkpointer.set_epochs(self.epochs)
        return True

    def validates_after(self, epochs_done: int) -> bool:
        val_every = self.run.config.val_every
        return epochs_done == self.epochs or (val_every > 0 and epochs_done % val_every == 0)

    def may_end_after(self, epochs_done: int) -> bool:
        """Whether the run ends after this epoch, or does unless it is better than those before."""
        stale, patience = epochs_done - self.progress.patience_epoch, self.run.config.patience
        return epochs_done == self.epochs or 0 < patience <= stale

    def before_validation(self) -> Action:
        """An epoch's steps are saved before its validation, which may be killed or fail, if they took long."""
        least_s = min(self._save_every_s, SAVE_BEFORE_VALIDATION_S)
        is_due = self._save_every_s > 0 and time.monotonic() - self._saved_at >= least_s
        return Action.SAVE if max_over_ranks(self.ctx, int(is_due)) else Action.CONTINUE

    def stops_validation(self) -> bool:
        """Whether a signal has reached this rank or, as of the last poll, another.

        Called before each batch of validation.
        """
        self._watchdog.beat()
        local, store, now = self._signals.stop or self._signals.interrupt, self.ctx.store, time.monotonic()
        if store is not None and local:
            store.set(STOP_KEY, "")
        elif store is not None and now - self._polled_at >= POLL_EVERY_S:
            self._polled_at = now
            local = store.check([STOP_KEY])
        self._validation_stopped = local
        return local

    def after_validation(self) -> Action:
        code = max_over_ranks(self.ctx, self._signals.code if self._validation_stopped else 0)
        return self._stop(code) if code else Action.CONTINUE

    def after_epoch(self, row: dict[str, float]) -> Action:
        """After validation and saving. ``row``: of results.csv, complete on rank 0."""
        if self._callbacks.hooks:
            self._callbacks.state.metrics = broadcast_object(self.ctx, row)
        return self._call_and_agree("on_epoch")

    @property
    def is_stopped_by_signal(self) -> bool:
        return self._exit_code != 0

    def saved(self) -> None:
        self._saved_at, self._save_requested = time.monotonic(), False

    def is_over(self, fitness: str) -> bool:
        """Whether no step follows. ``fitness``: what ``--patience`` waits for, for readers."""
        progress, config = self.progress, self.run.config
        if self.is_stopped or progress.epoch >= self.epochs:
            return True
        stale = progress.epoch - progress.patience_epoch
        is_validated = progress.batch == 0 and progress.best_epoch >= 0 and self.validates_after(progress.epoch)
        if not (config.patience and is_validated and stale >= config.patience):
            return False
        gain = f" by more than {config.min_gain:g}" if config.min_gain else ""
        epochs, best = counted(stale, "epoch"), progress.best_epoch
        log.info("no better %s%s in %s (best: epoch %d): stopped early", fitness, gain, epochs, best)
        return True

    def finish(self, epoch_batches: int) -> None:
        """After the last step: waits until all ranks have written everything. Returns if all epochs are done, or if a
        hook has asked to end the run.

        Raises:
            Stopped: a signal to any rank has ended it.
            UserError: a hook has failed; on the other ranks `PeerFailure`.
        """
        self.checkpointer.finish()
        has_failed = max_over_ranks(self.ctx, int(bool(self._callbacks.failure)))
        progress, last = self.progress, self.checkpointer.last
        where = counted(progress.epoch, "epoch")
        if progress.batch:
            where = f"epoch {progress.epoch + 1}, batch {progress.batch} of {epoch_batches}"
        if self._exit_code:
            log.info("stopped by a signal after %s; continue with: --resume %s", where, shlex.quote(str(last)))
            raise Stopped(self._exit_code)
        if has_failed:
            local = self._callbacks.failure
            raise UserError(local) if local else PeerFailure("a callback failed on another rank")
        if self.is_stopped:
            log.info("ended by a callback after %s; to train on: --resume %s", where, shlex.quote(str(last)))

    def _call_and_agree(self, hook: str) -> Action:
        """Calls a hook, and lets all ranks end if it asks for this on any. Without hooks they need not agree."""
        self._callbacks.call(hook)
        if self._callbacks.hooks and max_over_ranks(self.ctx, int(self._callbacks.stop_requested)):
            return self._stop(0)
        return Action.CONTINUE

    def _stop(self, exit_code: int) -> Action:
        self._exit_code, self.is_stopped = exit_code, True
        self._watchdog.stop_agreed()
        return Action.STOP
