"""The folder of a run: found, made, locked, and removed again if the run fails and has left nothing worth keeping."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType

import yaml

from engine.train.checkpoint import RunDescription
from engine.train.saver import RESULTS_CSV
from utils.config.settings import AUTO, TrainConfig
from utils.distributed.context import DistributedContext, all_objects, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError, os_reason
from utils.files.locks import FileLock
from utils.files.new_folder import increment_path
from utils.files.safe_io import open_direct, remove_half_written, write_whole
from utils.logger import continue_in_file, get_logger
from utils.process.child import report_started
from utils.schema import plain_value

LOCK_NAME = ".lock"  # in the run's folder; locked while a process trains it
SETTINGS_YAML = "settings.yaml"
REPORT = "report.html"
STARTED_BY = ".started-by"  # in the run's folder: its --name, then the torchrun processes that have started it
LOCK_PATIENCE_S = 3.0  # a process that was just killed may still be ending
SAVING_PATIENCE_S = 60.0  # a process that was told to stop may still be saving
# What a run writes, and ``--exist-ok`` removes, so that stale files are not mistaken for the new run's.
_FILES_OF_RUN = ("last.pt", "best.pt", RESULTS_CSV, SETTINGS_YAML, STARTED_BY, REPORT)
_NUMBERED_FILES = re.compile(r"epoch\d+\.pt|unscored\d+\.(pt|scores)|events\.out\.tfevents\..+")


def find_folder(command: TrainConfig, launchers: Sequence[str], stack: ExitStack) -> Path | None:
    """Returns the folder of the run that a command continues, or starts in its place, locked until ``stack`` is closed;
    None: a new folder. Only rank 0 calls this.

    Args:
        launchers: the identities of the torchrun processes that have started the ranks, see `run_started_by`.

    Raises UserError when there is no run to continue, or another process trains it.
    """
    if command.resume in (None, AUTO):
        named = command.folder
        folder = named if command.resume == AUTO else run_started_by(named.parent, launchers, named.name)
        if folder is None or not folder.is_dir():
            return None
        lock_folder(folder, stack, patience_s=SAVING_PATIENCE_S)
        checkpoints = sorted(path.name for path in folder.glob("*.pt"))
        if checkpoints and "last.pt" not in checkpoints:
            raise UserError(
                f"{folder}: has {checkpoints[0]}, but no last.pt to continue from; restore it, or choose another --name"
            )
        return folder
    folder = _named_last(command, launchers).parent
    if not is_read_only(folder):
        lock_folder(folder, stack)
    return folder


def _named_last(command: TrainConfig, launchers: Sequence[str]) -> Path:
    """Returns the last.pt that ``--resume`` names or finds. Raises UserError if there is none."""
    if command.resume:
        path = Path(command.resume)
    elif (restarted := run_started_by(Path(command.project), launchers)) is not None:
        path = restarted
    else:
        newest_last = sorted(Path(command.project).glob("*/last.pt"), key=lambda path: path.stat().st_mtime)
        if not newest_last:
            raise UserError(f"--resume: no last.pt in the folders of {command.project}; name one: --resume PATH")
        path = newest_last[-1]
    last = path / "last.pt" if path.is_dir() else path
    if not last.exists():
        raise UserError(f"{last}: no such checkpoint")
    if last.name != "last.pt":
        raise UserError(
            f"{last}: a run continues from its last.pt; to go back to this file, copy it as last.pt into a new folder, "
            f"and resume that; or begin a new run with --weights {shlex.quote(str(last))}"
        )
    return last


def is_read_only(folder: Path) -> bool:
    """Returns whether this process cannot write in the folder of a run: a run in it that has ended needs no lock."""
    return not os.access(folder, os.W_OK)


def claim_folder(
    ctx: DistributedContext,
    folder: Path | None,
    description: RunDescription,
    stack: ExitStack,
    is_kept: Callable[[], bool],
) -> Path:
    """Sets up the run's folder, with its settings and log: the first thing that a run writes. Every rank must call
    this, after the data set, the model and the weights have been checked, so that a refused command leaves nothing
    behind. Returns the folder.

    Args:
        folder: the folder of a run that continues or restarts, which is locked; None: `project/name` is made, or taken
            over with ``--exist-ok``.
        stack: when it is closed, a new folder is removed if the run has failed, unless ``is_kept``, and the folder is
            unlocked.
        is_kept: returns whether the run has taken a step, or was told to stop and save.

    Raises UserError when the folder cannot be made, and when another process trains there.
    """
    launchers = all_objects(ctx, ctx.launcher_identity)
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            if folder is None:
                folder = _make_folder(description.config, stack, is_kept)
            open(folder / "train.log", "ab", opener=open_direct).close()  # raises where a link leads elsewhere
            # A restart by any of these torchrun processes finds its folder before it knows its run.
            if any(launchers):
                lines = [description.command.folder.name, *dict.fromkeys(filter(None, launchers))]
                write_whole(folder / STARTED_BY, "\n".join(lines), durable=True)
            content = {"run_id": description.run_id, **asdict(description.settings)}
            write_whole(folder / SETTINGS_YAML, yaml.safe_dump(plain_value("settings", content), sort_keys=False))
            continue_in_file(folder / "train.log")
    folder = broadcast_object(ctx, folder)
    report_started(folder)
    get_logger().info("run folder %s (settings.yaml: all settings)", folder)
    return folder


def run_started_by(parent: Path, launchers: Sequence[str], name: str = "") -> Path | None:
    """Returns the newest run folder in ``parent`` that one of the torchrun processes ``launchers`` has started, which
    makes this start a restart; else None.

    ``name``: the name that the run was asked for, because a torchrun's script may train several runs; "": any.
    """
    wanted = {launcher for launcher in launchers if launcher}
    if not wanted:
        return None
    newest_first = sorted(parent.glob(f"*/{STARTED_BY}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first:
        asked_name, *started_by = path.read_text("utf-8", errors="replace").split("\n")
        if name in ("", asked_name) and not wanted.isdisjoint(started_by):
            return path.parent
    return None


def lock_folder(folder: Path, stack: ExitStack, *, patience_s: float = LOCK_PATIENCE_S) -> None:
    """Locks the run in ``folder`` until ``stack`` is closed, and removes files that a killed process left half written.
    Only rank 0 calls this.

    Raises UserError when another process still trains the run after ``patience_s`` seconds, or the folder cannot be
    written.
    """
    lock = FileLock(folder / LOCK_NAME)
    try:
        holder = lock.acquire(patience_s)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({os_reason(error)})") from None
    if holder:
        raise UserError(
            f"{folder}: another process is training this run ({holder}); wait for it, stop it, or start a new run "
            "with another --name"
        )
    stack.callback(lock.release)
    remove_half_written(folder)


def _make_folder(config: TrainConfig, stack: ExitStack, is_kept: Callable[[], bool]) -> Path:
    """Makes the folder of a new run, or takes over that of an earlier one (``--exist-ok``), and locks it until
    ``stack`` is closed."""
    is_auto = config.resume == AUTO
    planned = config.folder
    had_planned = planned.exists()
    folder = increment_path(config.project, config.name, config.exist_ok or is_auto)
    lock_folder(folder, stack)
    if is_auto and (folder / "last.pt").exists():
        raise UserError(f"{folder}: another start has trained here meanwhile; repeat the command to continue")
    is_new = not had_planned or folder != planned
    stack.push(partial(_remove_after_failure, folder, is_new, is_kept))
    if _remove_run(folder):
        get_logger().info("%s: the run in it is replaced (--exist-ok)", folder)
    return folder


def _remove_run(folder: Path) -> bool:
    """Removes the files of the run in ``folder``, except its log. Returns whether there were any."""
    paths = [path for path in folder.iterdir() if path.name in _FILES_OF_RUN or _NUMBERED_FILES.fullmatch(path.name)]
    for path in paths:
        path.unlink()
    return bool(paths)


def _remove_after_failure(
    folder: Path,
    is_new: bool,
    is_kept: Callable[[], bool],
    error_type: type[BaseException] | None,
    error: BaseException | None,
    frames: TracebackType | None,
) -> None:
    """Removes the run in ``folder`` if an error ends it before its first step; the whole folder if it was made for the
    run. Another run stays, because its log may be the only record of the failure."""
    if error is None:
        return
    traceback.clear_frames(frames)  # closes the files that they hold open, which may be too many
    if is_kept():
        return
    if is_new:
        shutil.rmtree(folder, ignore_errors=True)
    else:  # --exist-ok: the folder may have files of others
        with suppress(OSError):
            _remove_run(folder)
