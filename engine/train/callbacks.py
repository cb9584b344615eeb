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
from engine.train.control import StopCoordinator
from engine.train.step import TrainStep
from models.detector import Detector
from utils.config.yaml_files import suggestion
from utils.distributed.collectives import broadcast_object, max_over_ranks
from utils.distributed.context import DistributedContext
from utils.errors import PeerFailure, Stopped, UserError
from utils.files.checked_open import open_direct
from utils.logger import get_logger

HOOKS = ("on_start", "on_step", "on_epoch", "on_end")
Hook = Callable[["RunState"], None]


class RunState:
    """What a hook receives. Reading an attribute never waits for the device. Changing one changes nothing, except the
    weights of ``model``, which are those that are validated and saved.

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
        self,
        ctx: DistributedContext,
        run: Run,
        step: TrainStep,
        progress: Progress,
        *,
        steps_per_epoch: int,
        request_end: Callable[[], None],
    ) -> None:
        self.folder: Path = run.folder
        self.settings: dict[str, Any] = {**asdict(run.config), **asdict(run.hyp)}
        self.rank, self.world_size, self.is_main = ctx.rank, ctx.world_size, ctx.is_main
        self.epochs, self.steps_per_epoch = run.config.epochs, steps_per_epoch
        self.metrics: dict[str, float] = {}
        self._step, self._progress, self._request_end = step, progress, request_end

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
        self._request_end()


def load_hooks(source: str) -> dict[str, Hook]:
    """The hooks of the object that ``source`` (MODULE:OBJECT, or empty) names, imported from PYTHONPATH or the working
    folder; a class is instantiated.

    Raises UserError, of one line, for anything that is wrong with it.
    """
    if not source:
        return {}
    flag = f"--callbacks {source}"
    name, _, attribute = source.partition(":")
    if not name or not attribute:
        raise UserError(f"{flag}: must be MODULE:OBJECT, such as hooks:Hooks for the class Hooks of hooks.py")
    module = _import(name, flag)
    try:
        found = getattr(module, attribute)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        where = getattr(module, "__file__", None) or name
        raise UserError(f"{flag}: {where} has no '{attribute}'{suggestion(attribute, public)}") from None
    if isinstance(found, type):
        try:
            with _contained(f"{flag}: {attribute}()"):
                found = found()
        except (Exception, SystemExit) as error:
            raise UserError(f"{flag}: {attribute}() failed: {_place(error, module)}") from None
    return _hooks_of(found, flag)


def _import(name: str, flag: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for good: hooks may import later
    try:
        with _contained(f"{flag}: its import"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            hint = "; name the module without .py" if name.endswith(".py") or "/" in name else ""
            raise UserError(
                f"{flag}: there is no module '{error.name}' in {os.getcwd()} or on PYTHONPATH{hint}"
            ) from None
        raise UserError(f"{flag}: cannot be imported: {_place(error)}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag}: cannot be imported: {_place(error)}") from None


def _hooks_of(found: object, flag: str) -> dict[str, Hook]:
    known = ", ".join(HOOKS)
    if inspect.isroutine(found):
        found = SimpleNamespace(**{found.__name__: found})
    names = [name for name in dir(found) if name.startswith("on_")]
    for name in names:
        if name not in HOOKS:
            raise UserError(f"{flag}: '{name}' is no hook{suggestion(name, HOOKS)}; hooks are {known}")
    if not names:
        raise UserError(f"{flag}: has no hook; hooks are {known}")
    try:
        hooks = {name: getattr(found, name) for name in names}
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag}: {_place(error)}") from None
    for name, hook in hooks.items():
        if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook):
            raise UserError(f"{flag}: {name} must be a plain function; an async one or a generator would never run")
        try:
            inspect.signature(hook).bind(None)
        except (TypeError, ValueError):
            raise UserError(f"{flag}: {name} must be a function of one argument, the run") from None
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
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code != error.code and code:
            print(error.code, file=sys.stderr)
    elif error is not None:
        code = 1
        traceback.print_exception(error)
    sys.stdout.flush()
    os._exit(code & 0xFF)


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
    own = [frame for frame in frames if module is not None and frame.filename == getattr(module, "__file__", None)]
    return "".join(f"{frame.filename}:{frame.lineno}: " for frame in (own or frames)[-1:]) + what


class Callbacks:
    """Calls the hooks of a run on this rank, and ends the run when one asks for it or raises. Every rank has one and
    makes the same calls; without hooks they do nothing."""

    def __init__(
        self, hooks: dict[str, Hook], state: RunState, ctx: DistributedContext, stops: StopCoordinator, last: Path
    ) -> None:
        self._hooks, self.state, self._ctx, self._stops, self._last = hooks, state, ctx, stops, last
        self._flag = f"--callbacks {state.settings['callbacks']}"  # a hook may change its copy of the settings
        self._failure: str | None = None

    def set_epochs(self, epochs: int) -> None:
        """Tells the hooks another number of epochs of the whole run."""
        self.state.epochs = epochs

    def started(self) -> bool:
        """Before the first step. Returns whether the run ends, on all ranks the same."""
        self._call("on_start")
        return self._ends()

    def step_taken(self) -> None:
        """After each step. A request to end goes with the next step's flags."""
        self._call("on_step")

    def epoch_ended(self, row: dict[str, float]) -> bool:
        """After validation and saving. ``row``: of results.csv, complete on rank 0. Returns whether the run ends, on
        all ranks the same."""
        if self._hooks:
            self.state.metrics = broadcast_object(self._ctx, row)
        self._call("on_epoch")
        return self._ends()

    def ended(self) -> None:
        """After the last epoch, with all files written, or when a hook has ended the run; not after a signal."""
        self._call("on_end")
        if self._failure:
            raise UserError(self._failure)

    def raise_failure(self) -> None:
        """Once everything is saved: raises UserError on ranks where a hook has failed, PeerFailure on others."""
        if max_over_ranks(self._ctx, int(self._failure is not None)):
            raise UserError(self._failure) if self._failure else PeerFailure("a callback failed on another rank")

    def _ends(self) -> bool:
        return bool(self._hooks) and self._stops.agree_to_end()

    def _call(self, name: str) -> None:
        hook = self._hooks.get(name)
        if hook is None or self._failure is not None:
            return
        try:
            with _contained(f"{self._flag}: {name}"):
                hook(self.state)
        except Stopped:  # a second Ctrl-C
            raise
        except (Exception, SystemExit) as error:
            self._note_failure(name, hook, error)

    def _note_failure(self, name: str, hook: Hook, error: BaseException) -> None:
        """The other ranks know nothing of it yet: this one goes on until all end together."""
        log = self.state.folder / "train.log"
        try:
            with open(log, "a", encoding="utf-8", errors="backslashreplace", opener=open_direct) as file:
                file.write("".join(traceback.format_exception(error)))
        except OSError as refused:
            get_logger().warning("%s: cannot be written (%s)", log, refused.strerror or refused)
        module = sys.modules.get(getattr(hook, "__module__", None) or "")
        where = f"{self._flag}: {name} failed: {_place(error, module)}"
        self._failure = f"{where}; the traceback is in {log}"
        if name != "on_end":
            self._failure += f"; when it is mended, continue with: --resume {self._last}"
        self._stops.request_end()
