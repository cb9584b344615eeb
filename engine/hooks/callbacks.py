"""``--callbacks MODULE:OBJECT``: the user's functions, called on every rank during a run.

The object has some of the methods in `POINTS`, or is a function with one of these names. Each takes a `RunState`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.hooks.hook import Epoch, Hook, Training
from engine.run.results_csv import ResultsTable
from models.detector import Detector
from utils.distributed.context import broadcast_object
from utils.errors import UserError
from utils.files.safe_io import open_direct
from utils.schema import suggestion

POINTS = ("on_start", "on_step", "on_epoch", "on_end")
Callback = Callable[["RunState"], None]


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


def load_callbacks(source: str, results: ResultsTable) -> UserCallbacks:
    """Returns the hook for the object that ``source`` (MODULE:OBJECT) names, imported from PYTHONPATH or the working
    folder. ``results``: see `UserCallbacks`. Raises UserError if that fails, or if the object has no callback."""
    flag = f"--callbacks {source}"
    module_name, _, attribute = source.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{flag}: must be MODULE:OBJECT, such as hooks:Hooks for the class Hooks of hooks.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # permanently: callbacks may import later
    module = None
    try:
        module = importlib.import_module(module_name)
        callbacks = _callbacks_of(getattr(module, attribute))
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag}: {_located_message(error, getattr(module, '__file__', None))}") from None
    known = f"callbacks are {', '.join(POINTS)}"
    unknown = [name for name in callbacks if name not in POINTS]
    if unknown:
        raise UserError(f"{flag}: '{unknown[0]}' is not a callback{suggestion(unknown[0], POINTS)}; {known}")
    uncallable = [name for name, callback in callbacks.items() if not callable(callback)]
    if uncallable:
        raise UserError(f"{flag}: {uncallable[0]} is not callable; {known}")
    if not callbacks:
        raise UserError(f"{flag}: has no callback; {known}")
    return UserCallbacks(flag, callbacks, module.__file__, results)


def _callbacks_of(owner: Any) -> dict[str, Callback]:
    """Returns the callbacks of an object, by name: a function is one; a class is instantiated."""
    if isinstance(owner, type):
        owner = owner()
    if inspect.isroutine(owner):
        return {owner.__name__: owner}
    return {name: getattr(owner, name) for name in dir(owner) if name.startswith("on_")}


def _located_message(error: BaseException, path: str | None) -> str:
    """Returns ``file:line: type: message`` of the innermost line in the file ``path``, or of the innermost line if none
    is in it."""
    import_machinery = ("<frozen", __file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    relevant_frames = [frame for frame in frames if not frame.filename.startswith(import_machinery)]
    user_frames = [frame for frame in relevant_frames if frame.filename == path]
    location = ""
    if isinstance(error, SyntaxError):
        location = f"{error.filename}:{error.lineno}: "
    elif relevant_frames:
        innermost = (user_frames or relevant_frames)[-1]
        location = f"{innermost.filename}:{innermost.lineno}: "
    return location + " ".join(traceback.format_exception_only(error)[-1].split())


class UserCallbacks(Hook):
    """Calls the callbacks of a run, from the file ``path``, on this rank. Once one has raised, the run ends.

    ``results``: on rank 0 the content of results.csv, of which an earlier hook keeps the epochs before this start.
    """

    def __init__(self, flag: str, callbacks: dict[str, Callback], path: str | None, results: ResultsTable) -> None:
        self._flag = flag
        self._callbacks = callbacks
        self._path = path
        self._results = results
        self._failure = ""

    def start(self, trainer: Training) -> None:
        self._state = RunState(
            folder=trainer.run.folder,
            settings=trainer.run.settings.by_name(),
            rank=trainer.ctx.rank,
            world_size=trainer.ctx.world_size,
            is_main=trainer.ctx.is_main,
            model=trainer.step.ema.module,
            stop=trainer.control.request_stop,
            metrics=broadcast_object(trainer.ctx, _newest_row(self._results)),
        )
        self._call("on_start", trainer)

    def after_step(self, trainer: Training) -> None:
        self._call("on_step", trainer)

    def record(self, trainer: Training, epoch: Epoch) -> None:
        self._state.metrics = broadcast_object(trainer.ctx, epoch.row)

    def after_epoch(self, trainer: Training, epoch: Epoch) -> None:
        self._call("on_epoch", trainer)

    def finish(self, trainer: Training) -> None:
        self._call("on_end", trainer)

    def _call(self, name: str, trainer: Training) -> None:
        """Calls the callback ``name``, if the user has one and none has failed, with the newest state."""
        if name not in self._callbacks or self._failure:
            return
        state = self._state
        progress = trainer.progress
        state.epoch = progress.epoch
        state.epochs = trainer.epochs
        state.step = progress.updates
        state.steps_per_epoch = trainer.steps.per_epoch
        state.losses = progress.mean_losses(trainer.step.criterion.names)
        try:
            self._callbacks[name](state)
        except (Exception, SystemExit) as error:
            self._fail(name, error, trainer)

    def _fail(self, name: str, error: BaseException, trainer: Training) -> None:
        """Writes the traceback to the log, and ends the run."""
        self._failure = f"{self._flag}: {name} failed: {_located_message(error, self._path)}"
        path = trainer.run.folder / "train.log"
        with suppress(OSError):  # the disk may be full
            with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=open_direct) as file:
                file.write("".join(traceback.format_exception(error)))
            self._failure += f"; the traceback is in {path}"
        trainer.control.fail(self._failure, error)


def _newest_row(results: ResultsTable) -> dict[str, float]:
    """Returns the columns of the newest epoch, without its number; none if there is no epoch yet."""
    cells = results.rows[max(results.rows)] if results.rows else {}
    return {name: float(cell) for name, cell in cells.items() if name != "epoch"}
