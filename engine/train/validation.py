"""The two validators of a run: its own processes validate an epoch at once, or others do it (``--eval-ranks``) while
these train the next one. Both complete epochs: score, record, save and report them."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from data.index.index import DatasetIndex
from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import copy_to_cpu
from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import PendingEpoch
from engine.eval_ranks.messages import SetupMessage, WeightsMessage, common_facts
from engine.eval_ranks.service import ValidationService
from engine.hooks.hook import Action, Epoch
from engine.run.assembly import RunValidation
from engine.run.run import RunSettings, TrainingRun
from engine.train.step import TrainStep
from engine.train.trainer import Trainer, Validator
from utils.config.settings import TrainConfig, validates_after
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError


class LocalValidator:
    """Validates the averaged weights every ``val_every`` epochs (0: in none of them) and after the last one, in the
    training processes. See `Validator`.

    ``pending``: the epoch that an earlier start of the run has left without scores, if there is one.
    """

    def __init__(self, validation: RunValidation, *, val_every: int, pending: PendingEpoch | None = None) -> None:
        self.validation = validation
        self.pending = pending
        self._val_every = val_every

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether ``epoch``, from 1, of ``epochs`` is validated."""
        return validates_after(epoch, epochs, self._val_every)

    def submit(self, trainer: Trainer, epoch: Epoch) -> Action:
        if self.is_due(epoch.number, trainer.epochs):
            action = self._validate(trainer, trainer.step.ema.module, epoch)
            if action.breaks_off:
                return action
        trainer.progress.complete_epoch()
        trainer.record_epoch(epoch)
        trainer.save_epoch(epoch)
        trainer.call_hooks("report", epoch)
        return Action.CONTINUE

    def collect(self, trainer: Trainer) -> Action:
        if self.pending is None:
            return Action.CONTINUE
        action = self._complete_pending(trainer, self.pending)
        if not action.breaks_off:
            trainer.save_last()
        return action

    def _validate(self, trainer: Trainer, model: nn.Module, epoch: Epoch) -> Action:
        """Validates ``model`` on all ranks; rank 0 has the result, unless a signal has ended the validation."""
        trainer.call_hooks("before_validation")
        loader = self.validation.loader
        epoch.result = self.validation.evaluator.run(model, loader, should_stop=trainer.control.stops_validation)
        return trainer.control.after_validation()

    def _complete_pending(self, trainer: Trainer, pending: PendingEpoch) -> Action:
        """Completes the pending epoch. The run has gone on since, so only the epoch's own files are saved. A signal
        that ends its validation leaves it pending."""
        epoch = Epoch(pending.progress.epoch, dict(pending.row))
        action = self._validate_pending(trainer, epoch, pending)
        if action.breaks_off:
            return action
        self.pending = None
        trainer.record_epoch(epoch)
        trainer.checkpointer.save_scored(pending, trainer.progress, is_best=epoch.is_best, metrics=epoch.metrics)
        trainer.call_hooks("report", epoch)
        return Action.CONTINUE

    def _validate_pending(self, trainer: Trainer, epoch: Epoch, pending: PendingEpoch) -> Action:
        """Validates the weights of the pending epoch, as they were then."""
        model = copy.deepcopy(trainer.step.ema.module)
        model.load_state_dict(broadcast_object(trainer.ctx, pending.ema))
        criterion = trainer.step.criterion
        criterion.set_closing(pending.is_closing)
        action = self._validate(trainer, model, epoch)
        criterion.set_closing(trainer.is_closing)
        return action


class RemoteValidator(LocalValidator):
    """``--eval-ranks``: has an epoch validated by other processes while these train the next one.

    The training processes validate what cannot wait for that: the last epoch, which may be the one at which
    ``--patience`` ends; and those of which no result comes.
    """

    def __init__(
        self,
        validation: RunValidation,
        service: ValidationService,
        *,
        val_every: int,
        pending: PendingEpoch | None = None,
    ) -> None:
        super().__init__(validation, val_every=val_every, pending=pending)
        self._service = service

    def submit(self, trainer: Trainer, epoch: Epoch) -> Action:
        if self.pending is not None:  # its scores decide whether this epoch may be the last
            action = self._complete_pending(trainer, self.pending)
            if action.breaks_off:
                return action
        if not self._can_wait(trainer, epoch) or not self._service.can_take_weights():
            return super().submit(trainer, epoch)
        self.pending = _pending_epoch(trainer, epoch)
        self._service.send(epoch.number, WeightsMessage(self.pending.ema, self.pending.is_closing))
        trainer.progress.complete_epoch()
        trainer.save_epoch(epoch)
        return Action.CONTINUE

    def _can_wait(self, trainer: Trainer, epoch: Epoch) -> bool:
        """Whether an epoch is validated, and may be so after the next one: it is not the last of the run."""
        is_due = self.is_due(epoch.number, trainer.epochs)
        is_last = epoch.number == trainer.epochs
        may_stop_early = trainer.progress.has_stalled(trainer.run.config.patience, epoch=epoch.number)
        return is_due and not is_last and not may_stop_early

    def _validate_pending(self, trainer: Trainer, epoch: Epoch, pending: PendingEpoch) -> Action:
        """Takes the result of the evaluating processes; validates the weights here if there is none."""
        if not self._service.has_scores():
            trainer.call_hooks("before_validation")
        epoch.result = self._service.collect(trainer.control.stops_waiting)
        if broadcast_object(trainer.ctx, epoch.result is not None):
            return Action.CONTINUE
        action = trainer.control.after_validation()
        if action.breaks_off:
            return action
        return super()._validate_pending(trainer, epoch, pending)


def _pending_epoch(trainer: Trainer, epoch: Epoch) -> PendingEpoch:
    """Returns what is kept of an epoch, whose steps are done, until its result comes."""
    progress = replace(trainer.progress)
    progress.complete_epoch()
    return PendingEpoch(
        row={"time": trainer.seconds(), **epoch.row},
        is_closing=trainer.is_closing,
        progress=progress,
        ema=copy_to_cpu(trainer.step.ema.module.state_dict()) if trainer.ctx.is_main else {},
    )


def check_eval_ranks(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that need the scores of an epoch before the next one begins."""
    if ctx.eval_ranks and config.image_weights:
        raise UserError("--image-weights chooses images by the scores of the epoch before; leave out --eval-ranks")


def build_validator(
    run: TrainingRun,
    step: TrainStep,
    validation: RunValidation,
    *,
    description: RunDescription,
    data_source: DataSource,
    stack: ExitStack,
) -> Validator:
    """Builds the validator of a run. With ``--eval-ranks`` this tells the evaluating processes what to validate; they
    end when ``stack`` is closed."""
    ctx = step.ctx
    val_every = run.config.val_every
    pending = None if run.started_from is None else run.started_from.pending
    if not ctx.eval_ranks:
        return LocalValidator(validation, val_every=val_every, pending=pending)
    setup = build_setup(run.settings, step, description, data_source, validation.loader.index)
    service = ValidationService(ctx, validation.evaluator, setup)
    stack.callback(service.close)
    return RemoteValidator(validation, service, val_every=val_every, pending=pending)


def build_setup(
    settings: RunSettings, step: TrainStep, description: RunDescription, data_source: DataSource, val: DatasetIndex
) -> SetupMessage:
    """Returns what the evaluating processes must know of a run. ``val``: the split that is validated."""
    class_weights = step.criterion.class_weights
    return SetupMessage(
        settings=settings,
        source=replace(data_source, val_images=tuple(description.val_images)),
        names=description.names,
        model_spec=description.model_spec,
        ema=copy_to_cpu(step.ema.module.state_dict()),
        class_weights=None if class_weights is None else class_weights.cpu(),
        device=step.ctx.device.type,
        threads=torch.get_num_threads(),
        facts=common_facts(val),
    )
