"""Validation by the training processes."""

from __future__ import annotations

from torch import nn

from data.loading.loader import ValidationLoader
from engine.evaluation.evaluator import Evaluator
from engine.hooks.checkpoints import saved_if_unreadable
from engine.hooks.hook import Action, Epoch, Hook, Training


class Validation(Hook):
    """Validates the averaged weights every ``val_every`` epochs and after the last one.

    Args:
        loader: of the validation split.
        val_every: 0: only after the last epoch.
    """

    def __init__(self, evaluator: Evaluator, loader: ValidationLoader, val_every: int) -> None:
        self.evaluator, self.loader, self._val_every = evaluator, loader, val_every

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether ``epoch``, from 1, of so many is validated."""
        return epoch == epochs or (self._val_every > 0 and epoch % self._val_every == 0)

    def after_steps(self, trainer: Training, epoch: Epoch) -> Action:
        if epoch.is_pending or not self.is_due(epoch.number, trainer.epochs):
            return Action.CONTINUE
        return self.run(trainer, trainer.step.ema.module, epoch)

    def run(self, trainer: Training, model: nn.Module, epoch: Epoch) -> Action:
        """On every rank; rank 0 has the result, unless a signal has ended the validation."""
        trainer.call("before_validation")
        with saved_if_unreadable(trainer):
            epoch.result = self.evaluator.run(model, self.loader, should_stop=trainer.control.stops_validation)
        return trainer.control.after_validation()
