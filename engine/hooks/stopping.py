"""What ends a run early: steps that are not finite, early stopping, a limit of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.checkpoint.checkpoint import Progress
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.optim.schedule import epochs_in_time
from engine.parallel.control import StepValues
from utils.distributed.collectives import broadcast_object
from utils.errors import UserError, one_line
from utils.files.safe_io import open_direct
from utils.strings import counted

log = logging.getLogger("lockstep")

# Of torch's first loss scale, 2^16, by which float16's range is found; then each step in a row is strange.
HALVINGS = 16
MOST_BAD_STEPS = 20  # in a row end a run: more than `HALVINGS`


class NonFiniteSteps(Hook):
    """Names the files of a step that was skipped. Raises UserError if `MOST_BAD_STEPS` were in a row."""

    def read(self, trainer: Training, values: StepValues) -> Action:
        if values.finite:
            return Action.CONTINUE
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
            what = f"{last} holds the last good weights: resume" if last.exists() else "No checkpoint yet: start again"
            raise UserError(
                f"stopped: the last {progress.bad_steps} steps were not finite. {what} with a lower lr0 "
                "(--set lr0=...) or with --amp off"
            )
        return Action.CONTINUE


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
