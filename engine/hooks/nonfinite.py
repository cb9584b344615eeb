"""Names the files of steps that are skipped because they are not finite, and ends a run that has only such steps."""

from __future__ import annotations

from engine.hooks.hook import Hook, Training
from engine.parallel.step_values import StepValues
from utils.errors import UserError
from utils.logger import get_logger
from utils.program import resume_flag

# GradScaler starts at 2^16: up to 16 consecutive overflows are its normal search for the scale.
MAX_SCALE_HALVINGS = 16
MAX_CONSECUTIVE_BAD_STEPS = 20  # non-finite steps in a row that end a run; must exceed `MAX_SCALE_HALVINGS`


class NonFiniteSteps(Hook):
    """Each rank names its files of a step that was skipped. Raises UserError after `MAX_CONSECUTIVE_BAD_STEPS`."""

    def after_read(self, trainer: Training, values: StepValues) -> None:
        if values.finite:
            return
        bad_steps = trainer.progress.bad_steps
        if values.local_finite and trainer.step.scaler.is_enabled() and bad_steps <= MAX_SCALE_HALVINGS:
            get_logger().info("float16 gradients overflow: step skipped, the loss scale is halved")
        elif values.paths:  # this rank's shard of a small batch may be empty
            cause = f"gradient (norm {values.grad_norm})" if values.local_finite else "loss"
            get_logger().warning("non-finite %s, step skipped; its files: %s", cause, " ".join(values.paths))
        if bad_steps >= MAX_CONSECUTIVE_BAD_STEPS:
            trainer.checkpointer.wait()
            last = trainer.checkpointer.last
            remedy = f"continue from the last good weights, {resume_flag(last)}," if last.exists() else "start again"
            advice = "with a lower lr0 (--set lr0=...) or with --amp off"
            raise UserError(f"stopped: the last {bad_steps} steps were not finite; {remedy} {advice}")
