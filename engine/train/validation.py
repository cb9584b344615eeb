"""The two validators of a run: the training processes validate an epoch at once, or evaluating processes do so
(``--eval-ranks``) while the next epoch is trained. The trainer decides when, and concludes the epochs: it scores,
records, saves and reports them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import nn

from data.index.index import DatasetIndex
from data.loading.loader import ValidationLoader
from engine.checkpoint.checkpoint import copy_to_cpu
from engine.checkpoint.description import RunDescription
from engine.checkpoint.progress import PendingEpoch
from engine.eval_ranks.messages import SetupMessage, WeightsMessage, common_facts
from engine.eval_ranks.service import ValidationService
from engine.evaluation.evaluator import Evaluator
from engine.hooks.hook import Action, Epoch
from engine.parallel.control import RunControl
from engine.run.run import RunPlan, RunSettings, TrainingRun
from engine.train.step import TrainStep
from engine.train.trainer import Validator
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError


@dataclass(frozen=True)
class RunValidation:
    """The validation split of a run, and the evaluator that scores a model on it."""

    loader: ValidationLoader
    evaluator: Evaluator


class LocalValidator:
    """Validates in the training processes. See `Validator`."""

    def __init__(self, validation: RunValidation, step: TrainStep, control: RunControl) -> None:
        self.validation = validation
        self._step = step
        self._control = control

    def validate(self, epoch: Epoch) -> Action:
        return self._run(self._step.ema.module, epoch)

    def takes_weights(self) -> bool:
        return False

    def send(self, pending: PendingEpoch) -> None:
        raise ValueError("no other process validates")

    def has_scores(self) -> bool:
        return False

    def collect(self, pending: PendingEpoch, epoch: Epoch, *, is_closing: bool) -> Action:
        """Validates the weights that are stored with the pending epoch."""
        model = copy.deepcopy(self._step.ema.module)
        model.load_state_dict(broadcast_object(self._step.ctx, pending.ema))
        criterion = self._step.criterion
        criterion.set_closing(pending.is_closing)
        action = self._run(model, epoch)
        criterion.set_closing(is_closing)
        return action

    def close(self) -> None:
        pass

    def _run(self, model: nn.Module, epoch: Epoch) -> Action:
        """Validates ``model`` on all ranks; rank 0 has the evaluation, unless a signal has ended the validation."""
        loader = self.validation.loader
        epoch.evaluation = self.validation.evaluator.run(model, loader, should_stop=self._control.should_stop)
        return self._control.after_validation()


class RemoteValidator:
    """``--eval-ranks``: lets other processes validate an epoch while the next one is trained here.

    ``local`` validates epochs that cannot wait, and those whose result does not arrive.
    """

    def __init__(
        self, ctx: DistributedContext, local: LocalValidator, service: ValidationService, control: RunControl
    ) -> None:
        self._ctx = ctx
        self._local = local
        self._service = service
        self._control = control

    def validate(self, epoch: Epoch) -> Action:
        return self._local.validate(epoch)

    def takes_weights(self) -> bool:
        return self._service.can_take_weights()

    def send(self, pending: PendingEpoch) -> None:
        self._service.send(pending.progress.epoch, WeightsMessage(pending.ema, pending.is_closing))

    def has_scores(self) -> bool:
        return self._service.has_scores()

    def collect(self, pending: PendingEpoch, epoch: Epoch, *, is_closing: bool) -> Action:
        """Takes the result of the evaluating processes; validates the weights here if there is none."""
        epoch.evaluation = self._service.collect(self._control.should_stop)
        if broadcast_object(self._ctx, epoch.evaluation is not None):
            return Action.CONTINUE
        action = self._control.after_validation()
        if action.skips_rest:
            return action
        return self._local.collect(pending, epoch, is_closing=is_closing)

    def close(self) -> None:
        self._service.close()


def check_eval_ranks(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that need the scores of an epoch before the next one begins."""
    if ctx.eval_ranks and config.image_weights:
        raise UserError("--image-weights chooses images by the scores of the previous epoch; leave out --eval-ranks")


def build_validator(
    run: TrainingRun,
    step: TrainStep,
    validation: RunValidation,
    control: RunControl,
    *,
    description: RunDescription,
    plan: RunPlan,
) -> Validator:
    """Builds the validator of a run. With ``--eval-ranks`` this tells the evaluating processes what to validate."""
    ctx = step.ctx
    local = LocalValidator(validation, step, control)
    if not ctx.eval_ranks:
        return local
    setup = build_setup(run.settings, step, description=description, plan=plan, val=validation.loader.index)
    service = ValidationService(ctx, setup)
    return RemoteValidator(ctx, local, service, control)


def build_setup(
    settings: RunSettings, step: TrainStep, *, description: RunDescription, plan: RunPlan, val: DatasetIndex
) -> SetupMessage:
    """Builds the message that describes a run to its evaluating processes. ``val``: the validation split."""
    class_weights = step.criterion.class_weights
    return SetupMessage(
        settings=settings,
        source=replace(plan.data_source, val_images=tuple(description.val_images)),
        finds_own_data="data" in plan.local_paths,
        names=description.names,
        model_spec=description.model_spec,
        ema=copy_to_cpu(step.ema.module.state_dict()),
        class_weights=None if class_weights is None else class_weights.cpu(),
        device=step.ctx.device.type,
        threads=torch.get_num_threads(),
        facts=common_facts(val),
    )
