"""Saves within an epoch, early stopping, the time limit, and the guard against non-finite steps."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from data.image_io.decode import have_single_colors
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.optim.schedule import epochs_in_time
from engine.parallel.step_values import StepValues
from utils.distributed.context import broadcast_object, max_over_ranks
from utils.errors import UserError, one_line
from utils.files.safe_io import open_direct
from utils.program import resume_flag
from utils.strings import counted

log = logging.getLogger("lockstep")

# GradScaler starts at 2^16: up to 16 consecutive overflows are its normal search for the scale.
HALVINGS = 16
MAX_CONSECUTIVE_BAD_STEPS = 20  # non-finite steps in a row that end a run; must exceed `HALVINGS`
SAVE_BEFORE_VALIDATION_S = 60.0  # since the last save; a checkpoint costs less than repeating as much training


class Checkpoints(Hook):
    """Saves within an epoch every ``every_s`` seconds by the clock of rank 0; 0: at the ends of epochs only."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self._is_requested = False

    def start(self, trainer: Training) -> Action | None:
        """Saves at once if the run resumes from another file than last.pt, which it then does not have."""
        checkpoint = trainer.run.checkpoint
        if checkpoint is None:
            return None
        is_last = checkpoint.path.resolve() == trainer.checkpointer.last.resolve()
        return None if is_last else Action.SAVE

    def after_step(self, trainer: Training) -> None:
        """Raises UserError if an earlier write has failed."""
        trainer.checkpointer.check()
        if trainer.ctx.is_main and not self._is_requested and 0 < self._every_s <= self._age_s():
            trainer.control.request(Action.SAVE)  # one clock decides for all
            self._is_requested = True

    def before_validation(self, trainer: Training) -> Action | None:
        """Saves the steps of an epoch, if they took long, before a validation that may be killed or fail."""
        min_age_s = min(self._every_s, SAVE_BEFORE_VALIDATION_S)
        is_due = trainer.ctx.is_main and 0 < min_age_s <= self._age_s()
        return Action.SAVE if max_over_ranks(trainer.ctx, int(is_due)) else None

    def after_save(self) -> None:
        self._saved_at = time.monotonic()
        self._is_requested = False

    def _age_s(self) -> float:
        """Returns the seconds since the last save."""
        return time.monotonic() - self._saved_at


class NonFiniteSteps(Hook):
    """Names the files of a step that was skipped. Raises UserError after `MAX_CONSECUTIVE_BAD_STEPS` of them."""

    def __init__(self) -> None:
        self._are_blank: list[bool] = []  # whether all images have a single color, for each bad step in a row

    def read(self, trainer: Training, values: StepValues) -> None:
        progress = trainer.progress
        if values.finite:
            self._are_blank = []
            return
        if values.local_finite and trainer.step.scaler.is_enabled() and progress.bad_steps <= HALVINGS:
            log.info("float16 gradients overflow: step skipped, the loss scale is halved")
        else:
            self._name_files(trainer, values)
        if progress.bad_steps >= MAX_CONSECUTIVE_BAD_STEPS:
            trainer.checkpointer.wait()
            raise UserError(self._reason(trainer, values))

    def _name_files(self, trainer: Training, values: StepValues) -> None:
        """Logs the files of a bad step, and appends them to this rank's list."""
        file = _list_of_files(trainer)
        with open(file, "a", encoding="utf-8", errors="surrogateescape", opener=open_direct) as opened:
            opened.write(one_line(f"epoch {trainer.progress.epoch + 1}: {' '.join(values.paths)}") + "\n")
        is_blank = have_single_colors(values.paths, trainer.loader.index.pixels)
        self._are_blank.append(is_blank)
        files = " ".join(values.paths) + (", all of a single color" if is_blank else "")
        if not values.local_finite:
            log.warning("non-finite loss, step skipped; its files: %s", files)
        elif trainer.ctx.is_main or is_blank:
            log.warning("non-finite gradient (norm %s), step skipped; its files: %s", values.grad_norm, files)

    def _reason(self, trainer: Training, values: StepValues) -> str:
        """Says why the run stops, and what to do."""
        if self._are_blank and all(self._are_blank):
            return _reason_for_blank_images(trainer, values)
        last = trainer.checkpointer.last
        if last.exists():
            remedy = f"To continue from the last good weights: {resume_flag(last)},"
        else:
            remedy = "There is no checkpoint yet: start again"
        advice = "with a lower lr0 (--set lr0=...) or with --amp off"
        return f"stopped: the last {trainer.progress.bad_steps} steps were not finite. {remedy} {advice}"


def _reason_for_blank_images(trainer: Training, values: StepValues) -> str:
    """Says what to do about images without contrast: batch normalization divides by the deviation, which is 0."""
    last = trainer.checkpointer.last
    location = ""
    continuation = "start again"
    if last.exists():  # otherwise the folder goes with the run
        location = f" ({_list_of_files(trainer)} names them)"
        continuation = f"continue from the last good weights: {resume_flag(last)}"
    return (
        f"stopped: the last {trainer.progress.bad_steps} steps were not finite, since all of their images have a "
        f"single color, such as {values.paths[0]}{location}. Remove them, or correct 'bits' and 'channels' in the "
        f"data set's YAML if the files are not like that, and {continuation}"
    )


def _list_of_files(trainer: Training) -> Path:
    """Returns the path of this rank's list of files."""
    return trainer.run.folder / f"nonfinite_rank{trainer.ctx.rank}.txt"


class EarlyStopping(Hook):
    """Ends the run after ``patience`` epochs without a better ``fitness``; it validates every ``val_every`` epochs."""

    def __init__(self, patience: int, fitness: str, *, val_every: int) -> None:
        self._patience = patience
        self._fitness = fitness
        self._val_every = val_every

    def start(self, trainer: Training) -> Action | None:
        """Ends a run that was restarted after its end; ``--resume`` is refused before."""
        return self._decide(trainer)

    def after_epoch(self, trainer: Training, epoch: Epoch) -> Action | None:
        return self._decide(trainer)

    def _decide(self, trainer: Training) -> Action | None:
        progress = trainer.progress
        if not progress.stops_early(self._patience, epochs=trainer.epochs, val_every=self._val_every):
            return None
        log.info(
            "no better %s in %s (best: epoch %d): stopped early (--patience %d)",
            self._fitness,
            counted(progress.epoch - progress.best_epoch, "epoch"),
            progress.best_epoch,
            self._patience,
        )
        return Action.END


class TimeLimit(Hook):
    """``--time``: decides by rank 0's clock after an epoch's steps how many epochs the run has."""

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
            log.info("--time %g: %s", self._hours, counted(epochs, "epoch"))
            trainer.set_epochs(epochs)
