"""Base of hooks, which do everything in a training besides its steps, at fixed points of the loop
(engine/train/trainer.py), as detectron2's ``HookBase`` does:

    start
      before_epoch                               each epoch
        after_step, after_read                   each step
      after_last_step, validate                  the steps of the epoch are done
      score, record, (the run is saved), report  now, or for a pending epoch an epoch later: after validate_pending
      after_epoch
    after_steps, after_training, finish
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from data.loading.loader import InfiniteDataLoader
from engine.checkpoint.checkpoint import TrainState
from engine.checkpoint.checkpointer import Checkpointer
from engine.checkpoint.progress import PendingEpoch, Progress
from engine.optim.schedule import Schedule, StepPlan
from engine.parallel.control import Action, RunControl
from engine.parallel.step_values import StepFlags, StepValues
from engine.run.run import TrainingRun
from models.losses.base import Criterion
from utils.distributed.context import DistributedContext
from utils.structures import EvalResult

# Methods of `Hook` that the loop calls with the trainer. "before_validation" is called by `Validation`.
Point = Literal[
    "start",
    "before_epoch",
    "after_step",
    "after_read",
    "after_last_step",
    "validate",
    "validate_pending",
    "before_validation",
    "score",
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
    row: dict[str, float] = field(default_factory=dict)  # of results.csv
    pending: PendingEpoch | None = None  # set if other processes validate it: its result comes later
    # Of its validation, if there was one:
    result: EvalResult | None = None  # on rank 0
    class_ap: np.ndarray | None = None  # (C,)
    metrics: dict[str, float] = field(default_factory=dict)  # on rank 0, by their names in results.csv
    is_best: bool = False


class TrainingStep(TrainState, Protocol):
    """What hooks see of `engine.train.step.TrainStep`."""

    criterion: Criterion


class Training(Protocol):
    """What hooks see of `engine.train.trainer.Trainer`."""

    ctx: DistributedContext
    run: TrainingRun
    loader: InfiniteDataLoader
    progress: Progress
    control: RunControl
    checkpointer: Checkpointer
    hooks: Hooks
    epochs: int  # of the whole run
    steps: StepPlan
    schedule: Schedule
    is_closing: bool  # see `models.losses.base.Criterion.set_closing`
    step_samples: int  # of the newest step over all ranks; an image of ``--quad`` is made of four
    data_wait_s: float  # how long the newest step waited for them

    @property
    def step(self) -> TrainingStep: ...
    def call(self, point: Point, *args: Any) -> Action: ...
    def seconds(self) -> float: ...
    def set_epochs(self, epochs: int) -> None: ...
    def read_values(self, *, leave: int) -> StepFlags: ...


class Hook:
    """Base class, which does nothing.

    Most hooks are on every rank, in the same order, and their methods are called alike: all ranks must return the same
    action; None continues. Rank 0 has others besides, which write files (`build_hooks`): these return no action and
    call no collective, as no other rank would take part. A single rank requests an action (`RunControl.request`), which
    all take after the next step or epoch.

    What a hook must know when a run resumes is in `Progress`, or in a file that the hook writes.

    The end of an epoch has several points, so that each hook finds what it needs wherever it is in the list. An epoch
    is pending (`Epoch.pending`) while other processes validate it.
    """

    # Whether only `after_epoch` decides on the images of the next epoch, or if there is one: none can be prefetched.
    decides_next_epoch = False

    def start(self, trainer: Training) -> Action | None:
        """Called before the first step of this process."""

    def before_epoch(self, trainer: Training) -> Action | None:
        """Called before the first step that this process takes of an epoch."""

    def after_step(self, trainer: Training) -> Action | None:
        """Called after each step of the optimizer."""

    def after_read(self, trainer: Training, values: StepValues) -> Action | None:
        """Called when the host has the values of a step: one step late, or before something is saved."""

    def after_last_step(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Called after the last step of an epoch, when all ranks have the same model."""

    def validate(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Validates the epoch if that is due: sets `Epoch.result`, or `Epoch.pending` if the result comes later."""

    def validate_pending(self, trainer: Training, epoch: Epoch, pending: PendingEpoch) -> Action | None:
        """Gets the result of an epoch that was pending: sets `Epoch.result`. A signal may end this (`Action.STOP`); the
        epoch then stays pending."""

    def before_validation(self, trainer: Training) -> Action | None:
        """Called before the training processes validate an epoch."""

    def score(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Completes the row of an epoch: with scores if it has been validated, without if it is not due."""

    def record(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Called when the row of an epoch is complete, before the run is saved with it."""

    def report(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Called when a recorded epoch has been saved: for what takes long or may fail, such as plots."""

    def after_epoch(self, trainer: Training, epoch: Epoch) -> Action | None:
        """Called at the end of every epoch, when it has been saved; a pending one has no scores yet."""

    def after_steps(self, trainer: Training) -> Action | None:
        """Called after the last step of this process and its save, also if a signal has ended the run, before the log
        tells its progress."""

    def after_training(self, trainer: Training) -> Action | None:
        """Called after `after_steps`, unless a signal has ended the run."""

    def finish(self, trainer: Training) -> Action | None:
        """Called when all files are written. Not called after a signal or an error."""

    def after_save(self) -> None:
        """Called after each save."""

    def close(self) -> None:
        """Called at the end, however the training has ended."""


HookT = TypeVar("HookT", bound=Hook)


class Hooks:
    """The hooks of a run, in their order."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = tuple(hooks)
        self.decide_next_epoch = any(hook.decides_next_epoch for hook in hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def call(self, point: Point, trainer: Training, *args: Any) -> Action:
        """Calls a method of all hooks, up to one that interrupts the run. Returns their actions, joined."""
        action = Action.CONTINUE
        for hook in self._hooks:
            action |= getattr(hook, point)(trainer, *args) or Action.CONTINUE
            if action.interrupts:
                break
        return action

    def get(self, kind: type[HookT]) -> HookT:
        """Returns the hook of class ``kind``. Raises LookupError if the run has none."""
        for hook in self._hooks:
            if isinstance(hook, kind):
                return hook
        raise LookupError(f"this run has no hook {kind.__name__}; it has {', '.join(map(_class_name, self._hooks))}")

    def after_save(self) -> None:
        """Tells all hooks that the run has been saved."""
        for hook in self._hooks:
            hook.after_save()


def _class_name(hook: Hook) -> str:
    return type(hook).__name__
