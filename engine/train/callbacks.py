"""``--callbacks MODULE:OBJECT``: functions of the user, called while a run goes on.

The object has any of the methods `HOOKS`, or is a function of such a name. Each takes a `RunState`. They are called on
every rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from engine.checkpoint.checkpoint import Progress
from engine.checkpoint.run import Run
from engine.train.step import TrainStep
from models.detector import Detector
from utils.config.yaml_files import suggestion
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.checked_open import open_direct
from utils.logger import get_logger

HOOKS = ("on_start", "on_step", "on_epoch", "on_end")
Hook = Callable[["RunState"], None]


class RunState:
    """What a hook receives. Reading an attribute never waits for the device, and setting one does not change the run;
    but ``model`` is the run's own, so what a hook does to its weights is validated and saved.

    Attributes:
        folder: of the run.
        settings: all flags and hyper-parameters by name.
        rank, world_size: of this process, and how many there are.
        is_main: whether this is rank 0, which should write files and print.
        epochs: of the whole run.
        steps_per_epoch: steps of the optimizer.
        metrics: the newest row of results.csv by its names, on every rank; empty before the first epoch ends.
    """

    def __init__(
        self, ctx: DistributedContext, run: Run, step: TrainStep, progress: Progress, *, steps_per_epoch: int
    ) -> None:
        self.folder: Path = run.folder
        self.settings: dict[str, Any] = {**asdict(run.config), **asdict(run.hyp)}
        self.rank, self.world_size, self.is_main = ctx.rank, ctx.world_size, ctx.is_main
        self.epochs, self.steps_per_epoch = run.config.epochs, steps_per_epoch
        self.metrics: dict[str, float] = {}
        self._step, self._progress, self._stop_requested = step, progress, False

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._progress.epoch

    @property
    def step(self) -> int:
        """Steps of the optimizer taken, over all epochs."""
        return self._progress.updates

    @property
    def losses(self) -> dict[str, float]:
        """Mean training losses of the epoch, up to the step before the newest; nan where there are none yet."""
        return self._progress.mean_losses(self._step.criterion.names)

    @property
    def model(self) -> Detector:
        """The detector with the averaged weights (EMA), on the device, as validated and saved. It is not a copy."""
        return self._step.ema.module

    def stop(self) -> None:
        """Ends the run, on all ranks after the same step: at most two steps later, or when the epoch ends. Everything
        is saved, so that ``--resume`` continues. A request of any rank is enough."""
        self._stop_requested = True


def load_hooks(source: str) -> dict[str, Hook]:
    """The hooks of the object that ``source`` (MODULE:OBJECT, or empty) names, imported from PYTHONPATH or the working
    folder; a class is instantiated.

    Raises UserError, of one line, for anything that is wrong with it.
    """
    if not source:
        return {}
    flag, (name, _, attribute) = f"--callbacks {source}", source.partition(":")
    if not name or not attribute:
        raise UserError(f"{flag}: must be MODULE:OBJECT, such as hooks:Hooks for the class Hooks of hooks.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for good: hooks may import later
    try:
        with _contained(f"{flag}: its import"):
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
        with _contained(f"{flag}: {what}"):
            found = found() if isinstance(found, type) else found
            found = SimpleNamespace(**{found.__name__: found}) if inspect.isroutine(found) else found
            hooks = {n: getattr(found, n) for n in dir(found) if n.startswith("on_")}
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag}: {what} failed: {_place(error, module)}") from None
    for name, hook in hooks.items():
        if name not in HOOKS:
            hint = suggestion(name, HOOKS)
            raise UserError(f"{flag}: '{name}' is not a hook{hint}; hooks are {', '.join(HOOKS)}")
        if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook):
            raise UserError(f"{flag}: {name} must be a plain function; an async one or a generator would never run")
        try:
            inspect.signature(hook).bind(None)
        except (TypeError, ValueError):
            raise UserError(f"{flag}: {name} must be a function of one argument, the run") from None
    if not hooks:
        raise UserError(f"{flag}: has no hook; hooks are {', '.join(HOOKS)}")
    return hooks


@contextlib.contextmanager
def _contained(what: str) -> Iterator[None]:
    """A block that runs code of the user. A process that it has forked ends with it, and must not go on training as a
    copy of this one. State of this process that it has changed is undone, with a warning that names ``what``."""
    process, before = os.getpid(), [value() for value, _, _ in _STATE]
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != process:
            _end_child(error)
        for (value, reset, name), old in zip(_STATE, before):
            if old not in ("", value()):
                _warn_once(f"{what} has changed {name} ({old}, now {value()}); that is undone")
                reset(old)


@functools.cache
def _warn_once(line: str) -> None:
    get_logger().warning("%s", line)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


# State of the process on which training depends: how to read and set it, and its name.
_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], object], str], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled, "whether gradients are computed"),
    (torch.get_num_threads, torch.set_num_threads, "the number of threads"),
    (torch.get_default_dtype, torch.set_default_dtype, "torch's default dtype"),
    (torch.get_default_device, lambda _: torch.set_default_device(None), "torch's default device"),
    (_working_folder, os.chdir, "the working folder"),
)


def _end_child(error: BaseException | None) -> NoReturn:
    """Ends a forked process with the status that Python would give it, but without the clean-up on the way: the run,
    its files and its process group belong to the parent."""
    status = error.code if isinstance(error, SystemExit) else error  # None, a number, or what is printed
    if isinstance(status, BaseException):
        traceback.print_exception(status)
    elif status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    os._exit(status & 0xFF if isinstance(status, int) else int(status is not None))


def _place(error: BaseException, module: ModuleType | None = None) -> str:
    """``file:line: type: message`` of the innermost line in ``module``, or else of the innermost of the user's code."""
    try:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    except Exception:  # of the user's own __str__
        what = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    hidden = ("<frozen", __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(hidden)]
    inside = [frame for frame in frames if module is not None and frame.filename == getattr(module, "__file__", None)]
    return "".join(f"{frame.filename}:{frame.lineno}: " for frame in (inside or frames)[-1:]) + what


class Callbacks:
    """Calls the hooks of a run on this rank. Once one has raised, none is called any more.

    Attributes:
        failure: a line about the hook that has raised; empty: none has. The other ranks do not know of it.
    """

    def __init__(self, hooks: dict[str, Hook], state: RunState) -> None:
        self.hooks, self.state, self.failure = hooks, state, ""
        self._flag = f"--callbacks {state.settings['callbacks']}"  # a hook may change its copy of the settings

    @property
    def stop_requested(self) -> bool:
        """Whether a hook of this rank asks to end the run, or has raised."""
        return self.state._stop_requested or bool(self.failure)

    def ended(self) -> None:
        """After the last epoch, with all files written, or when a hook has ended the run; not after a signal."""
        self.call("on_end")
        if self.failure:
            raise UserError(self.failure)

    def call(self, name: str) -> None:
        hook = self.hooks.get(name)
        if hook is None or self.failure:
            return
        try:
            with _contained(f"{self._flag}: {name}"):
                hook(self.state)
        except (Exception, SystemExit) as error:
            self._note_failure(name, hook, error)

    def _note_failure(self, name: str, hook: Hook, error: BaseException) -> None:
        log = self.state.folder / "train.log"
        try:
            with open(log, "a", encoding="utf-8", errors="backslashreplace", opener=open_direct) as file:
                file.write("".join(traceback.format_exception(error)))
        except OSError as refused:
            get_logger().warning("%s: cannot be written (%s)", log, refused.strerror or refused)
        module = sys.modules.get(getattr(hook, "__module__", None) or "")
        where = f"{self._flag}: {name} failed: {_place(error, module)}"
        self.failure = f"{where}; the traceback is in {log}"
        if name != "on_end":
            last = shlex.quote(str(self.state.folder / "last.pt"))
            self.failure += f"; when it is fixed, continue with: --resume {last}"
