"""``--callbacks MODULE:OBJECT``: functions of the user, called on every rank while a run goes on.

The object has any of the methods `POINTS`, or is a function of such a name. Each takes a `RunState`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.hooks.hook import Action, Epoch, Hook, Training
from models.detector import Detector
from utils.config.yaml_files import suggestion
from utils.distributed.collectives import broadcast_object
from utils.errors import UserError
from utils.files.checked_open import open_direct

log = logging.getLogger("lockstep")

POINTS = ("on_start", "on_step", "on_epoch", "on_end")
Callback = Callable[["RunState"], None]


class RunState:
    """What a callback receives. Reading an attribute never waits for the device, and setting one does not change the
    run; but ``model`` is the run's own, so what a callback does to its weights is validated and saved.

    Attributes:
        folder: of the run.
        settings: all flags and hyper-parameters by name.
        rank, world_size: of this process, and how many there are.
        is_main: whether this is rank 0, which should write files and print.
        metrics: the newest row of results.csv by its names, on every rank; empty before the first epoch ends.
    """

    def __init__(self, trainer: Training) -> None:
        run, ctx = trainer.run, trainer.ctx
        self.folder: Path = run.folder
        self.settings: dict[str, Any] = {**asdict(run.config), **asdict(run.hyp)}
        self.rank, self.world_size, self.is_main = ctx.rank, ctx.world_size, ctx.is_main
        self.metrics: dict[str, float] = {}
        self._trainer = trainer

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._trainer.progress.epoch

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return self._trainer.epochs

    @property
    def step(self) -> int:
        """Steps of the optimizer taken, over all epochs."""
        return self._trainer.progress.updates

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer."""
        return self._trainer.plan.steps

    @property
    def losses(self) -> dict[str, float]:
        """Mean training losses of the epoch, up to the step before the newest; nan where there are none yet."""
        return self._trainer.progress.mean_losses(self._trainer.step.criterion.names)

    @property
    def model(self) -> Detector:
        """The detector with the averaged weights (EMA), on the device, as validated and saved. It is not a copy."""
        return self._trainer.step.ema.module

    def stop(self) -> None:
        """Ends the run, on all ranks after the same step: at most two steps later, or when the epoch ends. Everything
        is saved, so that ``--resume`` continues. A request of any rank is enough."""
        self._trainer.control.request(Action.STOP)


def load_callbacks(source: str) -> UserCallbacks:
    """The hook for the object that ``source`` (MODULE:OBJECT) names, imported from PYTHONPATH or the working folder; a
    class is instantiated.

    Raises UserError, of one line, for anything that is wrong with it.
    """
    flag, (name, _, attribute) = f"--callbacks {source}", source.partition(":")
    if not name or not attribute:
        raise UserError(f"{flag}: must be MODULE:OBJECT, such as hooks:Hooks for the class Hooks of hooks.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for good: callbacks may import later
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if not absent or not f"{name}.".startswith(f"{absent}."):
            raise UserError(f"{flag}: cannot be imported: {_place(error)}") from None
        hint = "; name the module without .py" if name.endswith(".py") or "/" in name else ""
        raise UserError(f"{flag}: there is no module '{absent}' in {os.getcwd()} or on PYTHONPATH{hint}") from None
    if not hasattr(module, attribute):
        hint = suggestion(attribute, [n for n in vars(module) if not n.startswith("_")])
        raise UserError(f"{flag}: {getattr(module, '__file__', None) or name} has no '{attribute}'{hint}")
    found = getattr(module, attribute)
    what = f"{attribute}()" if isinstance(found, type) else attribute
    try:
        callbacks = _callbacks_of(found)
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag}: {what} failed: {_place(error, module.__file__)}") from None
    for name, callback in callbacks.items():
        if name not in POINTS:
            raise UserError(
                f"{flag}: '{name}' is not a callback{suggestion(name, POINTS)}; callbacks are {', '.join(POINTS)}"
            )
        if inspect.iscoroutinefunction(callback) or inspect.isgeneratorfunction(callback):
            raise UserError(f"{flag}: {name} must be a plain function; an async one or a generator would never run")
        try:
            inspect.signature(callback).bind(None)
        except (TypeError, ValueError):
            raise UserError(f"{flag}: {name} must be a function of one argument, the run") from None
    if not callbacks:
        raise UserError(f"{flag}: has no callback; callbacks are {', '.join(POINTS)}")
    return UserCallbacks(flag, callbacks)


def _callbacks_of(found: Any) -> dict[str, Callback]:
    found = found() if isinstance(found, type) else found
    found = SimpleNamespace(**{found.__name__: found}) if inspect.isroutine(found) else found
    return {name: getattr(found, name) for name in dir(found) if name.startswith("on_")}


def _place(error: BaseException, path: str | None = None) -> str:
    """``file:line: type: message`` of the innermost line in the file ``path``, or else of the innermost line."""
    try:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    except Exception:  # of the user's own __str__
        what = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<frozen", __file__))]
    inside = [frame for frame in frames if frame.filename == path]
    return "".join(f"{frame.filename}:{frame.lineno}: " for frame in (inside or frames)[-1:]) + what


class UserCallbacks(Hook):
    """Calls the callbacks of a run on this rank. Once one has raised, the run ends, and none is called any more."""

    def __init__(self, flag: str, callbacks: dict[str, Callback]) -> None:
        self._flag, self._callbacks, self._failure = flag, callbacks, ""
        self._state: RunState | None = None
        self._row: dict[str, float] = {}

    def start(self, trainer: Training) -> Action:
        self._state = RunState(trainer)
        return self._call("on_start", trainer)

    def after_step(self, trainer: Training) -> Action:
        return self._call("on_step", trainer)

    def scored(self, trainer: Training, epoch: Epoch) -> Action:
        self._row = epoch.row
        return Action.CONTINUE

    def after_epoch(self, trainer: Training, epoch: Epoch) -> Action:
        self._state.metrics = broadcast_object(trainer.ctx, self._row)
        return self._call("on_epoch", trainer)

    def finish(self, trainer: Training) -> Action:
        """Raises UserError if the callback fails."""
        self._call("on_end", trainer)
        if self._failure:
            raise UserError(self._failure)
        return Action.CONTINUE

    def _call(self, name: str, trainer: Training) -> Action:
        callback = self._callbacks.get(name)
        if callback is not None and not self._failure:
            try:
                callback(self._state)
            except (Exception, SystemExit) as error:
                self._fail(name, callback, error, trainer)
        return Action.CONTINUE

    def _fail(self, name: str, callback: Callback, error: BaseException, trainer: Training) -> None:
        path = trainer.run.folder / "train.log"
        try:
            with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=open_direct) as file:
                file.write("".join(traceback.format_exception(error)))
        except OSError as refused:
            log.warning("%s: cannot be written (%s)", path, refused.strerror or refused)
        module = sys.modules.get(getattr(callback, "__module__", None) or "")
        where = _place(error, getattr(module, "__file__", None))
        self._failure = f"{self._flag}: {name} failed: {where}; the traceback is in {path}"
        if name != "on_end":
            self._failure += (
                f"; when it is fixed, continue with: --resume {shlex.quote(str(trainer.checkpointer.last))}"
            )
            trainer.control.fail(self._failure)
