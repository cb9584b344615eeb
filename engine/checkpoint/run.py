"""What a run is: its folder, its settings, and the checkpoint it goes on from."""

from __future__ import annotations

import gc
import shutil
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.resume import (
    circumstances_changed,
    forget_launch,
    newest_checkpoint,
    note_launch,
    read_run,
    resumed_config,
    resumed_hyperparameters,
    run_of_launch,
)
from utils.config.parser import read_recipe
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.collectives import all_objects, broadcast_object, torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.folders import check_run_dir, find_location, increment_path
from utils.files.locks import FileLock

LOCK_NAME = ".lock"  # in the run's folder, while a process trains it
_PATIENCE_S = 3.0  # a process that was just killed may still be ending


@dataclass(frozen=True)
class Run:
    """A run on its way; the same on every rank."""

    folder: Path  # of a new run what the settings say, until `claim_folder`
    config: TrainConfig
    hyp: Hyperparameters
    path: Path  # of the checkpoint
    content: dict[str, Any] | None  # of the checkpoint; None: the run begins
    lines: list[str]  # what the log is to begin with
    data_root: str = ""  # folder of the data set, where a checkpoint tells
    begun: bool = True  # it has a folder


@contextmanager
def open_run(ctx: DistributedContext, config: TrainConfig, given: Collection[str]) -> Iterator[Run]:
    """A new run, whose folder `claim_folder` makes, the one that ``--resume`` means, or, when torchrun starts its
    processes again, the one they were at, from its newest checkpoint. Rank 0 decides, and keeps other trainings out of
    the folder of a run that goes on, until the block ends.

    Args:
        given: names of the settings that the command line has.

    Raises UserError when there is nothing to go on with, a folder could not be made, or another process trains there.
    """
    hyp = read_recipe(config.hyp, config.override, pretrained=bool(config.weights))
    launchers = all_objects(ctx, ctx.launcher)
    former = broadcast_object(ctx, run_of_launch(config.project, launchers) if ctx.is_main else None)
    if former is not None:
        folder, path = former, former / "last.pt"
    elif config.resume is None:
        with torch_distributed_zero_first(ctx):
            if ctx.is_main:
                check_run_dir(config.project, config.name, config.exist_ok)
        folder = Path(config.project) / config.name
        yield Run(folder, config, hyp, folder / "last.pt", None, [], begun=False)
        return
    else:
        path = Path(config.resume) if config.resume else Path(broadcast_object(ctx, newest_checkpoint(config.project)))
        path = path / "last.pt" if path.is_dir() else path
        folder = path.parent
    with _locked(ctx, folder):
        if former is not None and not path.is_file():
            run = Run(folder, config, hyp, path, None, ["restarted before the first checkpoint"])
        else:
            run = _reopen(ctx, config, given, path)
            assert run.content is not None
            done = run.content["progress"]["epoch"]
            if former is None and done >= run.config.epochs:
                raise UserError(f"{path}: all {done} epochs are done; to train on, ask for more: --resume --epochs N")
        if ctx.is_main:
            note_launch(config.project, launchers, folder)
        yield run


@contextmanager
def claim_folder(ctx: DistributedContext, run: Run) -> Iterator[Run]:
    """The run with a folder of its own, the same on every rank, from which other trainings are kept out until the block
    ends. Every rank must enter it, once the data set, the model and the weights are known to be good, so that what is
    refused leaves nothing behind. A block that fails before the first checkpoint takes with it the folders made here.

    Raises UserError when the folder cannot be made, or when another process trains there (with ``--exist-ok``).
    """
    if run.begun:  # `open_run` has locked its folder
        yield run
        return
    config, launchers = run.config, all_objects(ctx, ctx.launcher)
    with ExitStack() as stack:
        folder, made = run.folder, []
        with torch_distributed_zero_first(ctx):
            if ctx.is_main:
                folder, made, lock = _new_folder(config)
                stack.callback(lock.release)
        folder = Path(broadcast_object(ctx, folder))
        stack.enter_context(_discarding_unbegun(ctx, config.project, folder, made))  # while nobody else has it
        if ctx.is_main:
            note_launch(config.project, launchers, folder)
        yield replace(run, folder=folder, path=folder / "last.pt", begun=True)


def _new_folder(config: TrainConfig) -> tuple[Path, list[Path], FileLock]:
    """A run's folder, those that had to be made for it, the innermost first, and its lock, taken."""
    named = Path(config.project) / config.name
    while True:
        absent = [p for p in (named, *named.parents) if not p.exists()]
        folder = increment_path(config.project, config.name, config.exist_ok)
        made = [folder, *(p for p in absent if p != named)] if not config.exist_ok or named in absent else []
        with suppress(FileNotFoundError):  # a run that failed before its first checkpoint has just removed it
            return folder, made, _lock_run(folder)


@contextmanager
def _discarding_unbegun(ctx: DistributedContext, project: str, folder: Path, made: list[Path]) -> Iterator[None]:
    """If the block fails before the first checkpoint, removes the folders in ``made``, the innermost first: there is
    nothing to go on with. What was written down about a hang keeps the run's folder. The caller has the run's lock."""
    try:
        yield
    except BaseException as error:
        if made:
            _give_back(ctx, error)
        if made and not any([*folder.glob(kept)] for kept in ("*.pt", "stall_rank*.txt")):
            shutil.rmtree(folder, ignore_errors=True)
            forget_launch(project, folder)
            for outer in made[1:]:
                with suppress(OSError):  # other runs are in it
                    outer.rmdir()
        raise


def _give_back(ctx: DistributedContext, error: BaseException) -> None:
    """Closes files and frees memory that what failed still holds: to remove a folder takes some of both, and they may
    be what was too few. In silence: objects that were half made when it failed (torch's loader iterator) complain."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        traceback.clear_frames(error.__traceback__)
        if not ctx.is_distributed:  # to collect what belongs to a broken group takes longer than the launcher waits
            gc.collect()
    finally:
        sys.unraisablehook = hook


@contextmanager
def _locked(ctx: DistributedContext, folder: Path) -> Iterator[None]:
    """Holds off other trainings that would write the run in ``folder``, which need not exist."""
    with ExitStack() as stack:
        with torch_distributed_zero_first(ctx):
            if ctx.is_main and folder.is_dir():
                stack.callback(_lock_run(folder).release)
        yield


def _lock_run(folder: Path) -> FileLock:
    """The lock of the run in ``folder``, taken. Removes what a killed process was writing there.

    Raises UserError where another training has it, FileNotFoundError where there is no such folder.
    """
    lock = FileLock(folder / LOCK_NAME)
    if holder := lock.acquire(_PATIENCE_S):
        raise UserError(
            f"{folder}: another training is writing this run ({holder}); wait for it or stop it, or start a run of its "
            "own with another --name"
        )
    for half_written in folder.glob(".*.tmp"):  # by `utils.files.safe_io`
        half_written.unlink(missing_ok=True)
    return lock


def _reopen(ctx: DistributedContext, config: TrainConfig, given: Collection[str], path: Path) -> Run:
    """The run that wrote checkpoint ``path``, with what the command line changes."""
    content = read_run(path)
    pretrained = bool(content["config"].get("weights"))
    hyp, changes = resumed_hyperparameters(content["hyp"], config, given, path, pretrained=pretrained)
    source, root = find_location(content["data"], path)
    stored = content["config"] | ({} if content["config"].get("data") == "demo" else {"data": source})
    config, lines = resumed_config(stored, config, given, path)
    lines += changes
    done, batch = content["progress"]["epoch"], content["progress"].get("batch", 0)
    within = f" and {batch} batches" if batch else ""
    lines += circumstances_changed(content.get("run", {}), world_size=ctx.world_size, device=ctx.device.type)
    lines.insert(0, f"resuming {path} after epoch {done} of {config.epochs}{within}")
    return Run(path.parent, config, hyp, path, content, lines, data_root=root if config.data == source else "")
