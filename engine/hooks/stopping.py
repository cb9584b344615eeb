"""What saves a run within an epoch, by the clock, and what ends it early: a limit of time, early stopping, steps that
are not finite."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.checkpoint.checkpoint import Progress
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.optim.schedule import epochs_in_time
from engine.parallel.step_values import StepValues
from utils.distributed.context import broadcast_object, max_over_ranks
from utils.errors import UserError, one_line
from utils.files.safe_io import open_direct
from utils.program import resume_flag
from utils.strings import counted

log = logging.getLogger("lockstep")

# Of torch's first loss scale, 2^16, by which float16's range is found; then each step in a row is strange.
HALVINGS = 16
MOST_BAD_STEPS = 20  # in a row end a run: more than `HALVINGS`
SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training


class Checkpoints(Hook):
    """Saves every so many seconds by the clock of rank 0; 0: not within an epoch."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._saved_at, self._is_requested = every_s, time.monotonic(), False

    def start(self, trainer: Training) -> Action | None:
        """A run that is resumed from another file than its own last.pt has none yet."""
        former, last = trainer.run.checkpoint, trainer.checkpointer.last
        return Action.SAVE if former is not None and former.path.resolve() != last.resolve() else None

    def after_step(self, trainer: Training) -> None:
        """Raises UserError if an earlier write has failed."""
        trainer.checkpointer.check()
        if trainer.ctx.is_main and not self._is_requested and 0 < self._every_s <= self._age_s():
            trainer.control.request(Action.SAVE)  # one clock decides for all
            self._is_requested = True

    def before_validation(self, trainer: Training) -> Action | None:
        """An epoch's steps are saved before its validation, which may be killed or fail, if they took long."""
        least_s = min(self._every_s, SAVE_BEFORE_VALIDATION_S)
        is_due = trainer.ctx.is_main and 0 < least_s <= self._age_s()
        return Action.SAVE if max_over_ranks(trainer.ctx, int(is_due)) else None

    def saved(self) -> None:
        self._saved_at, self._is_requested = time.monotonic(), False

    def _age_s(self) -> float:
        return time.monotonic() - self._saved_at


class NonFiniteSteps(Hook):
    """Names the files of a step that was skipped. Raises UserError if `MOST_BAD_STEPS` were in a row."""

    def read(self, trainer: Training, values: StepValues) -> None:
        if values.finite:
            return
        progress = trainer.progress
        if not values.local_finite:
            listed = trainer.run.folder / f"nonfinite_rank{trainer.ctx.rank}.txt"
            with open(listed, "a", encoding="utf-8", errors="surrogateescape", opener=open_direct) as file:
                file.write(one_line(f"epoch {progress.epoch}: {' '.join(values.paths)}") + "\n")
            log.warning("non-finite loss, step skipped; its files: %s", " ".join(values.paths))
        elif trainer.step.scaler.is_enabled() and progress.bad_steps <= HALVINGS:
            log.info("float16 gradients overflow: step skipped, the loss scale is halved")
        elif trainer.ctx.is_main:
            log.warning("non-finite gradient (norm %s), step skipped", values.grad_norm)
        if progress.bad_steps >= MOST_BAD_STEPS:
            trainer.checkpointer.wait()
            last = trainer.checkpointer.last
            if last.exists():
                remedy = f"To continue from the last good weights: {resume_flag(last)},"
            else:
                remedy = "There is no checkpoint yet: start again"
            raise UserError(
                f"stopped: the last {progress.bad_steps} steps were not finite. {remedy} with a lower lr0 "
                "(--set lr0=...) or with --amp off"
            )


class EarlyStopping(Hook):
    """Ends the run after ``patience`` epochs without a better ``fitness``. ``is_validated``: `Validation.is_due`."""

    def __init__(self, patience: int, fitness: str, is_validated: Callable[[int, int], bool]) -> None:
        self._patience, self._fitness, self._is_validated = patience, fitness, is_validated

    def start(self, trainer: Training) -> Action:
        return self._decide(trainer)

    def after_epoch(self, trainer: Training, epoch: Epoch) -> Action:
        return self._decide(trainer)

    def _decide(self, trainer: Training) -> Action | None:
        progress = trainer.progress
        is_validated = progress.batch == 0 and self._is_validated(progress.epoch, trainer.epochs)
        is_over = is_validated and progress.epoch < trainer.epochs and has_stalled(progress, self._patience)
        if not is_over or progress.best_epoch < 0:
            return None
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

    def before_epoch(self, trainer: Training) -> None:
        if self._steps_done_at:
            self._rest_s = time.monotonic() - self._steps_done_at

    def after_last_step(self, trainer: Training, epoch: Epoch) -> None:
        self._steps_done_at = time.monotonic()
        epochs = epochs_in_time(epoch.number, trainer.seconds() + self._rest_s, self._hours * 3600)
        epochs = broadcast_object(trainer.ctx, epochs)
        if epochs != trainer.epochs:
            log.info("--time %g: %s", self._hours, counted(epochs, "epoch"))
            trainer.set_epochs(epochs)
