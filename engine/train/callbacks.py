"""``--callbacks MODULE:OBJECT``: calls the user's functions during a run, on every rank."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.train.ledger import Epoch
from engine.train.loop import Hook, Trainer
from models.detector import Detector
from utils.distributed.context import broadcast_object
from utils.errors import UserError, one_line
from utils.logger import get_logger

POINTS = ("on_start", "on_step", "on_epoch", "on_end")


@dataclass
class RunState:
    """The argument of a callback. Setting an attribute does not change the run."""

    folder: Path
    settings: dict[str, Any]  # all flags and hyper-parameters by name
    rank: int
    world_size: int
    is_main: bool  # rank 0, which should write files and print
    model: Detector  # with the averaged weights (EMA), on the device; not a copy: changes are validated and saved
    stop: Callable[[], None]  # saves and ends the run: all ranks, at most two steps later or when the epoch ends
    epoch: int = 0  # completed
    epochs: int = 0  # epochs of the whole run
    step: int = 0  # taken by the optimizer, over all epochs
    steps_per_epoch: int = 0
    losses: dict[str, float] = field(default_factory=dict)  # means of the epoch, until the step before; nan: none yet
    metrics: dict[str, float] = field(default_factory=dict)  # the newest row of results.csv, on every rank


class UserCallbacks(Hook):
    """Calls the callbacks that ``--callbacks`` names. Once one has raised, the run ends.

    ``source``: MODULE:OBJECT, imported from PYTHONPATH or the working folder: a class, which is created without
    arguments, an object or module with callbacks, or a function with the name of one. Raises UserError if that fails,
    after the traceback has been logged, or if the object has no callback, or others.
    """

    def __init__(self, source: str) -> None:
        self._flag = f"--callbacks {source}"
        self._has_failed = False
        module, _, name = source.partition(":")
        if not module or not name:
            raise UserError(f"{self._flag}: must be MODULE:OBJECT, such as hooks:Hooks for the class Hooks of hooks.py")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # permanently: callbacks may import later
        try:
            owner = getattr(importlib.import_module(module), name)
            owner = owner() if isinstance(owner, type) else owner
        except (Exception, SystemExit) as error:
            raise UserError(_log_traceback(self._flag, error)) from None
        self._callbacks: dict[str, Any] = {name: getattr(owner, name) for name in dir(owner) if name.startswith("on_")}
        if inspect.isroutine(owner):
            self._callbacks = {owner.__name__: owner}
        if not self._callbacks or not all(name in POINTS and callable(call) for name, call in self._callbacks.items()):
            names = ", ".join(self._callbacks) or "nothing"
            raise UserError(f"{self._flag}: has {names}; callbacks are functions called {', '.join(POINTS)}")

    def start(self, trainer: Trainer) -> None:
        rows = trainer.ledger.table.rows
        newest = rows[max(rows)] if rows else {}
        self._state = RunState(
            folder=trainer.saver.folder,
            settings=trainer.settings.by_name(),
            rank=trainer.ctx.rank,
            world_size=trainer.ctx.world_size,
            is_main=trainer.ctx.is_main,
            model=trainer.step.ema.module,
            stop=trainer.control.request_stop,
            metrics={name: newest[name] for name in newest if name != "epoch"},
        )
        self._call("on_start", trainer)

    def after_step(self, trainer: Trainer) -> None:
        self._call("on_step", trainer)

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        self._state.metrics = broadcast_object(trainer.ctx, epoch.row)  # rank 0 has also measured the speed
        self._call("on_epoch", trainer)

    def finish(self, trainer: Trainer) -> None:
        self._call("on_end", trainer)

    def _call(self, name: str, trainer: Trainer) -> None:
        """Calls the callback ``name``, if the user has one and none has failed, with the newest state."""
        if name not in self._callbacks or self._has_failed:
            return
        state = self._state
        state.epoch = trainer.progress.epoch
        state.epochs = trainer.steps.epochs
        state.step = trainer.progress.updates
        state.steps_per_epoch = trainer.steps.per_epoch
        state.losses = trainer.progress.mean_losses(trainer.step.criterion.names)
        try:
            self._callbacks[name](state)
        except (Exception, SystemExit) as error:
            self._has_failed = True
            trainer.control.fail(_log_traceback(f"{self._flag}: {name} failed", error), error)


def _log_traceback(message: str, error: BaseException) -> str:
    """Logs ``message`` with the traceback of ``error``, and returns it with the error's type and text."""
    get_logger().error("%s", message, exc_info=error)
    return f"{message}: {one_line(traceback.format_exception_only(error)[-1].strip())}"
