"""``--eval-ranks``: the last processes of a job validate the averaged weights while the others train.

Both have process groups of their own, so the loss of an evaluating process (engine/commands/eval_rank.py) cannot break
a collective of the training ones. They exchange messages in the run's store: rank 0 posts what the others need to know
of the run, then the weights of an epoch whenever they are free, and finds their scores there an epoch later.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint, Progress, weights_part
from engine.checkpoint.checkpointer import copied
from engine.eval_ranks.evaluators import Evaluators, common_facts
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.hooks.results import Validation
from engine.run.run import training_source
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint
from utils.files.schema import check

# Fields of `Progress` that follow from a validation.
RESULT_FIELDS = ("best_fitness", "best_epoch", "confidence", "plain_confidence", "scored_confidence")


@dataclass
class _Pending:
    """The newest completed epoch, until its scores have come, and what is saved with them."""

    epoch: Epoch
    is_closing: bool  # see `models.losses.base.Criterion.set_closing`
    progress: Progress  # after the epoch
    ema: dict[str, Tensor]  # on the CPU of rank 0


class _StoredEpoch(TypedDict):
    """`_Pending` in a checkpoint."""

    row: dict[str, float]
    is_closing: bool
    progress: Progress
    ema: dict[str, Tensor]


class RemoteValidation(Hook):
    """Lets the evaluating processes validate. The result of an epoch counts at the end of the next one, as it would
    have at its own end. The training processes validate an epoch that may be the last, or whose scores are late. Comes
    before `Validation`.

    ``checkpoint``: of a resumed run; its newest epoch may be pending. Raises UserError for settings that need the
    scores of an epoch before the next one begins.
    """

    state_key = "remote_validation"

    def __init__(self, ctx: DistributedContext, config: TrainConfig, checkpoint: Checkpoint | None) -> None:
        if ctx.eval_ranks and config.image_weights:
            raise UserError("--image-weights chooses images by the scores of the epoch before; leave out --eval-ranks")
        self._ctx = ctx
        self._evaluators: Evaluators | None = None
        self._pending = pending_epoch(checkpoint) if checkpoint else None
        self._begins_with_pending = self._pending is not None

    def start(self, trainer: Training) -> None:
        self._validation = trainer.hooks.get(Validation)
        if self._ctx.eval_ranks:
            self._evaluators = Evaluators(self._ctx, self._validation.evaluator, self._setup(trainer))

    def before_epoch(self, trainer: Training) -> Action | None:
        """Validates first what the run had no scores of when it was stopped: all hooks have started by now."""
        if not self._begins_with_pending:
            return None
        self._begins_with_pending = False
        return self._settle(trainer)

    def validate(self, trainer: Training, epoch: Epoch) -> Action | None:
        action = self._settle(trainer)
        evaluators = self._evaluators
        if action is None and evaluators is not None and self._can_wait(trainer, epoch) and evaluators.is_free():
            self._send(trainer, epoch, evaluators)
        return action

    def _can_wait(self, trainer: Training, epoch: Epoch) -> bool:
        """Whether an epoch is validated, and may be so after the next one: it is not the last of the run."""
        is_due = self._validation.is_due(epoch.number, trainer.epochs)
        may_be_last = epoch.number == trainer.epochs
        may_be_last |= trainer.progress.has_stalled(trainer.run.config.patience, epoch=epoch.number)
        return is_due and not may_be_last

    def _send(self, trainer: Training, epoch: Epoch, evaluators: Evaluators) -> None:
        """Hands an epoch over to the evaluating processes, and keeps what is saved when its scores come."""
        epoch.is_pending = True
        epoch.row = {"time": trainer.seconds(), **epoch.row}
        progress = replace(trainer.progress, epoch=epoch.number)
        progress.begin_epoch()
        ema = copied(trainer.step.ema.module.state_dict()) if self._ctx.is_main else {}
        self._pending = _Pending(epoch, trainer.is_closing, progress, ema)
        evaluators.send(epoch.number, ema, closing=trainer.is_closing)

    def after_training(self, trainer: Training) -> Action | None:
        if self._pending is None:
            return None
        action = self._settle(trainer)  # a callback has ended the run
        trainer.save()
        return action

    def state_dict(self) -> dict[str, Any]:
        pending = self._pending
        if pending is None:
            return {}
        return {
            "row": pending.epoch.row,
            "is_closing": pending.is_closing,
            "progress": asdict(pending.progress),
            "ema": pending.ema,
        }

    def close(self) -> None:
        if self._evaluators is not None:
            self._evaluators.close()

    def _settle(self, trainer: Training) -> Action | None:
        """Counts the result of the pending epoch. If there is none, the training processes validate it; a signal that
        ends this leaves it pending."""
        pending = self._pending
        if pending is None:
            return None
        epoch = pending.epoch
        criterion = trainer.step.criterion
        if self._evaluators is not None:
            epoch.result = self._evaluators.collect(trainer.control.stops_validation)
        if not broadcast_object(self._ctx, epoch.result is not None):
            model = copy.deepcopy(trainer.step.ema.module)
            model.load_state_dict(broadcast_object(self._ctx, pending.ema))
            criterion.set_closing(pending.is_closing)
            action = self._validation.run(trainer, model, epoch)
            criterion.set_closing(trainer.is_closing)
            if action is Action.STOP:
                return action
        self._pending = None
        epoch.is_pending = False
        trainer.call("score", epoch)
        trainer.call("record", epoch)
        if self._ctx.is_main:
            self._save_scored(trainer, pending)
        trainer.call("report", epoch)
        return None

    def _save_scored(self, trainer: Training, pending: _Pending) -> None:
        """Writes best.pt, and epochN.pt once more, if they are due after the pending epoch."""
        checkpointer = trainer.checkpointer
        number = pending.epoch.number
        scored = {name: getattr(trainer.progress, name) for name in RESULT_FIELDS}
        result = {"progress": asdict(pending.progress) | scored, "metrics": pending.epoch.metrics}
        if pending.epoch.is_best:
            content = weights_part({**checkpointer.description.content(), "ema": pending.ema, **result})
            checkpointer.submit({checkpointer.best: content})
        if checkpointer.period and number % checkpointer.period == 0:
            checkpointer.finish()  # so that the file is there
            periodic = checkpointer.periodic(number)
            checkpointer.submit({periodic: {**read_checkpoint(periodic), "hooks": {}, **result}})

    def _setup(self, trainer: Training) -> dict[str, Any]:
        """Returns what the evaluating processes must know of the run."""
        run = trainer.run
        description = trainer.checkpointer.description
        weights = trainer.step.criterion.class_weights
        return {name: getattr(description, name) for name in ("model_spec", "names", "val_images")} | {
            "ema": copied(trainer.step.ema.module.state_dict()),
            "config": run.config,
            "hyp": run.hyp,
            "source": training_source(run.config, run.start),
            "class_weights": None if weights is None else weights.cpu(),
            "device": self._ctx.device.type,
            "threads": torch.get_num_threads(),
            "facts": common_facts(self._validation.loader.index),
        }


def pending_epoch(checkpoint: Checkpoint) -> _Pending | None:
    """Returns the epoch of a checkpoint that has not been validated yet, if there is one. Raises UserError for a state
    that no run writes."""
    stored = checkpoint.hooks.get(RemoteValidation.state_key)
    if stored is None:
        return None
    stored = check(stored, _StoredEpoch, f"{checkpoint.path}: damaged checkpoint: hooks")
    epoch = Epoch(stored["progress"].epoch, stored["row"], is_pending=True)
    return _Pending(epoch, stored["is_closing"], stored["progress"], stored["ema"])
