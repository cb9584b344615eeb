"""The base class of hooks, which do everything but steps and validations at fixed points of the training loop
(engine/train/trainer.py), like detectron2's ``HookBase``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from data.loading.loader import InfiniteDataLoader
from engine.evaluation.result import Evaluation
from engine.optim.schedule import Schedule, StepPlan
from engine.parallel.control import Action, RunControl
from engine.parallel.step_values import StepValues
from engine.train.checkpoint import Checkpointer, Progress, TrainState
from engine.train.resume import TrainingRun
from models.losses.base import Criterion
from utils.distributed.context import DistributedContext

# Points of the loop: methods of `Hook` that return an action. Its docstring lists them.
Point = Literal[
    "start",
    "before_epoch",
    "after_step",
    "after_read",
    "after_last_step",
    "before_validation",
    "record",
    "report",
    "after_epoch",
    "after_steps",
    "after_training",
    "finish",
]


@dataclass
class Epoch:
    """An epoch whose steps are done."""

    number: int  # from 1
    row: dict[str, float] = field(default_factory=dict)  # its row of results.csv
    # Results of its validation, if there was one:
    evaluation: Evaluation | None = None  # on rank 0
    class_ap: np.ndarray | None = None  # (C,)
    metrics: dict[str, float] = field(default_factory=dict)  # on rank 0, by their names in results.csv
    is_best: bool = False


class TrainingStep(TrainState, Protocol):
    """The part of `engine.train.step.TrainStep` that hooks see."""

    criterion: Criterion


class Training(Protocol):
    """The part of `engine.train.trainer.Trainer` that hooks see."""

    ctx: DistributedContext
    run: TrainingRun
    loader: InfiniteDataLoader
    progress: Progress
    control: RunControl
    checkpointer: Checkpointer
    epochs: int  # epochs of the whole run
    steps: StepPlan
    schedule: Schedule
    step_samples: int  # samples of the newest step over all ranks; with ``--quad``, four per image
    data_wait_s: float  # how long the newest step waited for its samples

    @property
    def step(self) -> TrainingStep: ...
    def seconds(self) -> float: ...
    def set_epochs(self, epochs: int) -> None: ...


class Hook:
    """Base class, which does nothing. Each method is a point of the loop, here in the order of the calls; N is the
    epoch in question, from 1, and ``done`` is `Progress.epoch` at this point.

    ================= ==== ============================================================================================
    point             done called
    ================= ==== ============================================================================================
    start             N-1  before the first step of this process, in a new and in a resumed run
    before_epoch      N-1  before the first step that this process takes of the epoch
    after_step        N-1  after each step of the optimizer
    after_read        N-1  when the host has the values of a step: a step later; at once at the end of an epoch, and
                           before a save
    after_last_step   N-1  after the last step of the epoch, when all ranks have the same model
    before_validation N-1  before the training processes validate an epoch, or wait for scores (``--eval-ranks``)
    record            N    when an epoch has its scores and its row, before its files are saved
    report            N    when its files are saved: for what takes long or may fail, such as plots
    after_epoch       N    at the end of every epoch, when the run is saved
    after_steps       any  after the last step of this process, also if a signal or a callback's failure has ended the
                           run, but not if a callback fails in ``start``
    after_training    any  when no validation is left either; not after a signal or an error
    finish            any  when all checkpoints are written; not after a signal or an error
    after_save        any  after each save of the run
    close             any  at the end, however the training has ended
    ================= ==== ============================================================================================

    An epoch that others validate is saved without scores: ``after_epoch`` comes first, and ``record`` and ``report``
    when the steps of the next epoch are done, or when the run ends or is resumed. ``before_validation`` comes before
    them, with ``done`` N, if the scores are not there yet. A start that only writes the report takes no step. It calls
    ``report`` for the last epoch, and ``before_validation`` first if it validates that again, both with ``done`` N.
    Such a start ignores requests to save.

    Most hooks are on every rank, in the same order. Their methods are called on all ranks alike, and may communicate;
    all ranks must return the same action (None continues), which the trainer follows. Rank 0 has additional hooks
    (`build_hooks`), which return no action and call no collective, because no other rank would take part. A single rank
    requests a save or a stop (`RunControl.request_save`, `request_stop`), and all ranks follow after the next step or
    epoch. `Epoch.evaluation` is on rank 0 alone.

    State that a hook needs when a run resumes is in `Progress`, or in a file that the hook writes.
    """

    # Whether the hook decides, at the end of an epoch, the images of the next epoch or whether there is one. None of
    # its batches is prefetched then.
    decides_next_epoch = False

    def start(self, trainer: Training) -> Action | None: ...
    def before_epoch(self, trainer: Training) -> Action | None: ...
    def after_step(self, trainer: Training) -> Action | None: ...
    def after_read(self, trainer: Training, values: StepValues) -> Action | None: ...
    def after_last_step(self, trainer: Training, epoch: Epoch) -> Action | None: ...
    def before_validation(self, trainer: Training) -> Action | None: ...
    def record(self, trainer: Training, epoch: Epoch) -> Action | None: ...
    def report(self, trainer: Training, epoch: Epoch) -> Action | None: ...
    def after_epoch(self, trainer: Training, epoch: Epoch) -> Action | None: ...
    def after_steps(self, trainer: Training) -> Action | None: ...
    def after_training(self, trainer: Training) -> Action | None: ...
    def finish(self, trainer: Training) -> Action | None: ...
    def after_save(self) -> None: ...
    def close(self) -> None: ...


class Hooks:
    """The hooks of a run, in their order."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = tuple(hooks)
        self.decide_next_epoch = any(hook.decides_next_epoch for hook in hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def call(self, point: Point, trainer: Training, *args: Any) -> Action:
        """Calls a method of all hooks, up to one that interrupts the run. Returns their actions, combined."""
        action = Action.CONTINUE
        for hook in self._hooks:
            action |= getattr(hook, point)(trainer, *args) or Action.CONTINUE
            if action.skips_rest:
                break
        return action

    def after_save(self) -> None:
        """Tells all hooks that the run has been saved."""
        for hook in self._hooks:
            hook.after_save()
