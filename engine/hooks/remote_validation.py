"""``--eval-ranks``: other processes validate the averaged weights of an epoch while these train the next one."""

from __future__ import annotations

from dataclasses import replace

import torch

from data.source.dataset_spec import DataSource
from engine.checkpoint.checkpoint import copy_to_cpu
from engine.checkpoint.progress import PendingEpoch, Progress
from engine.eval_ranks.messages import Setup, Weights, common_facts
from engine.eval_ranks.service import ValidationService
from engine.hooks.hook import Epoch, Hook, Training
from engine.hooks.validation import Validation
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError


class RemoteValidation(Hook):
    """Hands epochs over to the evaluating processes, and takes their results one epoch later.

    Comes before `Validation`, which validates the epochs that are not handed over, and those of which no result comes.
    Raises UserError for settings that need the scores of an epoch before the next one begins.
    """

    _service: ValidationService  # made by `start`
    _validation: Validation

    def __init__(self, ctx: DistributedContext, config: TrainConfig, data_source: DataSource) -> None:
        if config.image_weights:
            raise UserError("--image-weights chooses images by the scores of the epoch before; leave out --eval-ranks")
        self._ctx = ctx
        self._data_source = data_source
        self._is_started = False

    def start(self, trainer: Training) -> None:
        self._validation = trainer.hooks.get(Validation)
        self._service = ValidationService(self._ctx, self._validation.evaluator, self._build_setup(trainer))
        self._is_started = True

    def validate(self, trainer: Training, epoch: Epoch) -> None:
        if self._can_wait(trainer, epoch) and self._service.can_take_weights():
            epoch.pending = self._pending_epoch(trainer, epoch)
            self._service.send(epoch.number, Weights(epoch.pending.ema, epoch.pending.is_closing))

    def validate_pending(self, trainer: Training, epoch: Epoch, pending: PendingEpoch) -> None:
        epoch.result = self._service.collect(trainer.control.stops_validation)

    def close(self) -> None:
        if self._is_started:
            self._service.close()

    def _can_wait(self, trainer: Training, epoch: Epoch) -> bool:
        """Whether an epoch is validated, and may be so after the next one: it is not the last of the run."""
        is_due = self._validation.is_due(epoch.number, trainer.epochs)
        may_be_last = epoch.number == trainer.epochs
        may_be_last |= trainer.progress.has_stalled(trainer.run.config.patience, epoch=epoch.number)
        return is_due and not may_be_last

    def _pending_epoch(self, trainer: Training, epoch: Epoch) -> PendingEpoch:
        """Returns what is kept of an epoch until its result comes."""
        return PendingEpoch(
            row={"time": trainer.seconds(), **epoch.row},
            is_closing=trainer.is_closing,
            progress=_completed_progress(trainer.progress),
            ema=copy_to_cpu(trainer.step.ema.module.state_dict()) if self._ctx.is_main else {},
        )

    def _build_setup(self, trainer: Training) -> Setup:
        """Returns what the evaluating processes must know of the run."""
        run = trainer.run
        description = trainer.checkpointer.description
        class_weights = trainer.step.criterion.class_weights
        return Setup(
            settings=run.settings,
            source=self._data_source,
            val_images=description.val_images,
            names=description.names,
            model_spec=description.model_spec,
            ema=copy_to_cpu(trainer.step.ema.module.state_dict()),
            class_weights=None if class_weights is None else class_weights.cpu(),
            device=self._ctx.device.type,
            threads=torch.get_num_threads(),
            facts=common_facts(self._validation.loader.index),
        )


def _completed_progress(progress: Progress) -> Progress:
    """Returns the progress with the epoch completed whose steps are done."""
    completed = replace(progress)
    completed.complete_epoch()
    return completed
