"""Steps that were skipped because their gradients are not finite."""

from __future__ import annotations

import logging

from engine.hooks.hook import Action, Hook, Training
from engine.parallel.step_values import StepValues
from utils.errors import UserError, one_line
from utils.files.safe_io import open_direct
from utils.strings import counted

log = logging.getLogger("lockstep")

HALVINGS = (
    16  # of torch's first loss scale, 2^16, by which float16's range is found; then each step in a row is strange
)


class NonFiniteSteps(Hook):
    """Names the files of a step that was skipped. Raises UserError if one step after another was.

    Args:
        most: how many in a row end the run.
    """

    def __init__(self, most: int) -> None:
        self._most = most

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
        if progress.bad_steps >= self._most:
            trainer.checkpointer.wait()
            last = trainer.checkpointer.last
            what = f"{last} holds the last good weights: resume" if last.exists() else "No checkpoint yet: start again"
            raise UserError(
                f"{counted(progress.bad_steps, 'step')} in a row not finite; stopped. {what} with a lower lr0 "
                "(--set lr0=...) or with --amp off"
            )
        return Action.CONTINUE
