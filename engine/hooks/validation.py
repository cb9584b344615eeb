"""The validation of an epoch by the training processes."""

from __future__ import annotations

import copy

from torch import nn

from data.loading.loader import ValidationLoader
from engine.checkpoint.progress import PendingEpoch
from engine.evaluation.evaluator import Evaluator
from engine.hooks.hook import Action, Epoch, Hook, Training
from utils.config.settings import validates_after
from utils.distributed.context import broadcast_object


class Validation(Hook):
    """Validates the averaged weights every ``val_every`` epochs (0: in none of them) and after the last one."""

    def __init__(self, evaluator: Evaluator, loader: ValidationLoader, val_every: int) -> None:
        self.evaluator = evaluator
        self.loader = loader
        self._val_every = val_every

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether ``epoch``, from 1, of ``epochs`` is validated."""
        return validates_after(epoch, epochs, self._val_every)

    def validate(self, trainer: Training, epoch: Epoch) -> Action | None:
        if epoch.pending is not None or not self.is_due(epoch.number, trainer.epochs):
            return None
        return self.run(trainer, trainer.step.ema.module, epoch)

    def validate_pending(self, trainer: Training, epoch: Epoch, pending: PendingEpoch) -> Action | None:
        """Validates the weights of the pending epoch, unless the evaluating processes have."""
        if broadcast_object(trainer.ctx, epoch.result is not None):
            return None
        model = copy.deepcopy(trainer.step.ema.module)
        model.load_state_dict(broadcast_object(trainer.ctx, pending.ema))
        criterion = trainer.step.criterion
        criterion.set_closing(pending.is_closing)
        action = self.run(trainer, model, epoch)
        criterion.set_closing(trainer.is_closing)
        return action

    def run(self, trainer: Training, model: nn.Module, epoch: Epoch) -> Action:
        """Validates ``model`` on all ranks; rank 0 has the result, unless a signal has ended the validation."""
        trainer.call("before_validation")
        epoch.result = self.evaluator.run(model, self.loader, should_stop=trainer.control.stops_validation)
        return trainer.control.after_validation()
