"""The two validators of a run: its own processes validate an epoch at once, or others do it (``--eval-ranks``) while
these train the next one. The trainer completes the epochs: it scores, records, saves and reports them."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from data.index.index import DatasetIndex
from data.loading.loader import ValidationLoader
from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import copy_to_cpu
from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import PendingEpoch
from engine.eval_ranks.messages import SetupMessage, WeightsMessage, common_facts
from engine.eval_ranks.service import ValidationService
from engine.evaluation.evaluator import Evaluator
from engine.hooks.hook import Action, Epoch
from engine.run.run import RunSettings, TrainingRun
from engine.train.step import TrainStep
from engine.train.trainer import Trainer, Validator
from utils.config.settings import TrainConfig, validates_after
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError


@dataclass(frozen=True)
class RunValidation:
    """The validation split of a run, and what scores a model on it."""

    loader: ValidationLoader
    evaluator: Evaluator


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
        if not self.is_due(epoch.number, trainer.epochs):
            return Action.CONTINUE
        return self._validate(trainer, trainer.step.ema.module, epoch)

    def collect(self, trainer: Trainer, epoch: Epoch) -> Action:
        """Validates the weights of the pending epoch, as they were then."""
        pending = self.pending
        assert pending is not None
        model = copy.deepcopy(trainer.step.ema.module)
        model.load_state_dict(broadcast_object(trainer.ctx, pending.ema))
        criterion = trainer.step.criterion
        criterion.set_closing(pending.is_closing)
        action = self._validate(trainer, model, epoch)
        criterion.set_closing(trainer.is_closing)
        if not action.breaks_off:
            self.pending = None
        return action

    def _validate(self, trainer: Trainer, model: nn.Module, epoch: Epoch) -> Action:
        """Validates ``model`` on all ranks; rank 0 has the result, unless a signal has ended the validation."""
        trainer.call_hooks("before_validation")
        loader = self.validation.loader
        epoch.result = self.validation.evaluator.run(model, loader, should_stop=trainer.control.stops_validation)
        return trainer.control.after_validation()


class RemoteValidator:
    """``--eval-ranks``: has an epoch validated by other processes while these train the next one.

    ``local`` validates what cannot wait for that: the last epoch, which may be the one at which ``--patience`` ends;
    and those of which no result comes. It holds the pending epoch.
    """

    def __init__(self, local: LocalValidator, service: ValidationService) -> None:
        self._local = local
        self._service = service

    @property
    def pending(self) -> PendingEpoch | None:
        return self._local.pending

    def submit(self, trainer: Trainer, epoch: Epoch) -> Action:
        if not self._can_wait(trainer, epoch) or not self._service.can_take_weights():
            return self._local.submit(trainer, epoch)
        pending = _pending_epoch(trainer, epoch)
        self._service.send(epoch.number, WeightsMessage(pending.ema, pending.is_closing))
        self._local.pending = pending
        return Action.CONTINUE

    def collect(self, trainer: Trainer, epoch: Epoch) -> Action:
        """Takes the result of the evaluating processes; validates the weights here if there is none."""
        if not self._service.has_scores():
            trainer.call_hooks("before_validation")
        epoch.result = self._service.collect(trainer.control.stops_waiting)
        if broadcast_object(trainer.ctx, epoch.result is not None):
            self._local.pending = None
            return Action.CONTINUE
        action = trainer.control.after_validation()
        if action.breaks_off:
            return action
        return self._local.collect(trainer, epoch)

    def _can_wait(self, trainer: Trainer, epoch: Epoch) -> bool:
        """Whether an epoch is validated, and may be so after the next one: it is not the last of the run."""
        is_due = self._local.is_due(epoch.number, trainer.epochs)
        is_last = epoch.number == trainer.epochs
        may_stop_early = trainer.progress.has_stalled(trainer.run.config.patience, epoch=epoch.number)
        return is_due and not is_last and not may_stop_early


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
    local = LocalValidator(validation, val_every=val_every, pending=pending)
    if not ctx.eval_ranks:
        return local
    setup = build_setup(run.settings, step, description, data_source, validation.loader.index)
    service = ValidationService(ctx, validation.evaluator, setup)
    stack.callback(service.close)
    return RemoteValidator(local, service)


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
