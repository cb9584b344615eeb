"""Hooks: what happens in a training besides its steps, at fixed points of the loop (engine/train/trainer.py), as with
detectron2's ``HookBase``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from data.loading.loader import InfiniteDataLoader
from engine.checkpoint.checkpoint import Progress
from engine.checkpoint.checkpointer import Checkpointer
from engine.optim.schedule import Schedule, StepPlan
from engine.parallel.control import Action, RunControl
from engine.parallel.step_values import StepFlags, StepValues
from engine.run.run import Run
from utils.distributed.context import DistributedContext
from utils.structures import EvalResult


@dataclass
class Epoch:
    """An epoch whose steps are done."""

    number: int  # from 1
    row: dict[str, float] = field(default_factory=dict)  # of results.csv
    is_pending: bool = False  # whether it is validated later
    # Of its validation, if there was one:
    result: EvalResult | None = None  # on rank 0
    class_ap: np.ndarray | None = None  # (C,)
    metrics: dict[str, float] = field(default_factory=dict)  # on rank 0, by their names in results.csv
    is_best: bool = False


class Training(Protocol):
    """What hooks see of `engine.train.trainer.Trainer`."""

    ctx: DistributedContext
    run: Run
    step: Any  # `engine.train.step.TrainStep`
    loader: InfiniteDataLoader
    progress: Progress
    control: RunControl
    checkpointer: Checkpointer
    hooks: Hooks
    epochs: int  # of the whole run
    plan: StepPlan
    schedule: Schedule
    is_closing: bool  # see `models.losses.base.Criterion.set_closing`
    images: int  # of the newest step over all ranks; one of ``--quad`` counts as the four that it is made of
    data_wait_s: float  # how long the newest step waited for them

    def call(self, point: str, *args: Any) -> Action: ...
    def seconds(self) -> float: ...
    def set_epochs(self, epochs: int) -> None: ...
    def save(self, epoch: Epoch | None = None) -> None: ...
    def read(self, *, leave: int) -> StepFlags: ...


class Hook:
    """Base class, which does nothing.

    Every rank has the same hooks in the same order, and calls the same methods. All ranks must return the same action;
    None continues. A single rank requests an action (`RunControl.request`), which all take after the next step or
    epoch.
    """

    # Whether only `after_epoch` decides on the images of the next epoch, or if there is one: none can be prefetched.
    decides_next_epoch = False

    def start(self, trainer: Training) -> Action | None:
        """Before the first step of this process."""

    def before_epoch(self, trainer: Training) -> Action | None:
        """Before the first step that this process takes of an epoch."""

    def after_step(self, trainer: Training) -> Action | None:
        """After each step of the optimizer."""

    def read(self, trainer: Training, values: StepValues) -> Action | None:
        """When the host has the values of a step: one step late, or before something is saved."""

    def after_last_step(self, trainer: Training, epoch: Epoch) -> Action | None:
        """After the last step of an epoch; all ranks have the same model. The place to validate."""

    def before_validation(self, trainer: Training) -> Action | None:
        """Before the training processes validate an epoch."""

    def after_validation(self, trainer: Training, epoch: Epoch) -> Action | None:
        """When the scores of an epoch are known, before they are saved; also for an epoch that is not validated."""

    def after_validation_saved(self, trainer: Training, epoch: Epoch) -> Action | None:
        """When what `after_validation` changed is saved."""

    def after_epoch(self, trainer: Training, epoch: Epoch) -> Action | None:
        """At the end of an epoch, when it is saved; a pending one has no scores yet."""

    def after_steps(self, trainer: Training) -> Action | None:
        """After the last step of this process and its save, also if a signal has ended the run, before the log says
        how far it has come."""

    def after_training(self, trainer: Training) -> Action | None:
        """After `after_steps`, unless a signal has ended the run."""

    def finish(self, trainer: Training) -> Action | None:
        """When all files are written. Not called after a signal or an error."""

    def saved(self) -> None:
        """After each save."""

    def close(self) -> None:
        """At the end, however the training has ended."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints store under the name of the class; empty: nothing."""
        return {}


HookT = TypeVar("HookT", bound=Hook)


class Hooks:
    """The hooks of a run, in their order."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = tuple(hooks)
        self.decide_next_epoch = any(hook.decides_next_epoch for hook in hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def call(self, point: str, trainer: Training, *args: Any) -> Action:
        """Calls a method of all hooks, up to one that stops the run. Returns the greatest action."""
        action = Action.CONTINUE
        for hook in self._hooks:
            action = max(action, getattr(hook, point)(trainer, *args) or Action.CONTINUE)
            if action is Action.STOP:
                break
        return action

    def get(self, kind: type[HookT]) -> HookT:
        """The hook of that class."""
        return next(hook for hook in self._hooks if isinstance(hook, kind))

    def state_dict(self) -> dict[str, Any]:
        return {type(hook).__name__: state for hook in self._hooks if (state := hook.state_dict())}

    def saved(self) -> None:
        for hook in self._hooks:
            hook.saved()
