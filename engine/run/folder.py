"""The folder of a run: made, locked, and removed again if the run fails and has left nothing worth keeping."""

from __future__ import annotations

import errno
import shlex
import shutil
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from engine.checkpoint.newest_run import checkpoint_of_newest_run, new_run_id, run_id_of
from engine.checkpoint.progress import Progress
from engine.run.complete_record import COMPLETE
from engine.run.launch_record import record_launch
from engine.run.merge_settings import is_same_start
from engine.run.new_folder import increment_path
from engine.run.previous_data import is_other_data, previous_data
from engine.run.run import ContinuedRun, RunPlan, RunSettings, TrainingRun
from engine.run.settings_yaml import StoredRun, read_stored_run, write_stored_run
from utils.config.settings import AUTO, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError, os_reason
from utils.files.locks import FileLock
from utils.files.safe_io import open_direct, remove_half_written
from utils.logger import continue_in_file, get_logger
from utils.process.child import report_begun
from utils.program import resume_flag

LOCK_NAME = ".lock"  # in the run's folder; locked while a process trains it
LOCK_PATIENCE_S = 3.0  # a process that was just killed may still be ending
SAVING_PATIENCE_S = 60.0  # a process that was told to stop may still be saving
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FILES_WORTH_KEEPING = ("*.pt", "stall_rank*.txt")  # a folder with one of these is kept if its run fails early


class ReadOnlyFolder(UserError):
    """The folder of a run cannot be written."""


def claim_folder(
    ctx: DistributedContext, plan: RunPlan, settings: RunSettings, stack: ExitStack, progress: Progress
) -> TrainingRun:
    """Sets up the run's folder, with its settings and its log: the first thing that a run writes. Every rank must call
    this, after the data set, the model and the weights have been checked, so that a refused command leaves nothing
    behind.

    Args:
        settings: the run's settings; none of them is left open.
        stack: when it is closed, a new folder is removed if the run has failed before its first step and saved no
            checkpoint, and the folder is unlocked.
        progress: the run's progress; the trainer counts its steps there.

    Raises UserError when the folder cannot be created, when another process trains there (``--exist-ok``), or when one
    has trained there since the plan was made (``--resume auto``).
    """
    folder = plan.folder
    if folder is None:
        folder = _make_folder(ctx, settings.config, stack, progress)
    run_id = broadcast_object(ctx, _choose_run_id(plan, settings) if ctx.is_main else "")
    if ctx.is_main:
        open(folder / "train.log", "ab", opener=open_direct).close()  # raises where a symbolic link leads elsewhere
        write_stored_run(folder, StoredRun(run_id, settings))  # first: from now on, the folder belongs to this run
        record_launch(folder, run_id, plan.launchers)
        continue_in_file(folder / "train.log")
        (folder / COMPLETE).unlink(missing_ok=True)
    report_begun(folder)
    get_logger().info("run folder %s (settings.yaml: all settings)", folder)
    return TrainingRun(
        folder=folder, run_id=run_id, settings=settings, started_from=plan.started_from, remaining=plan.remaining
    )


def _choose_run_id(plan: RunPlan, settings: RunSettings) -> str:
    """Returns the stored id of a run that continues, or that restarts before its first checkpoint; else a new id.
    ``settings``: those of ``plan``, of which none is left open."""
    if isinstance(plan, ContinuedRun):
        return plan.started_from.description.run_id
    if plan.folder is not None:
        newest = read_stored_run(plan.folder)
        planned = replace(plan.settings, hyp=replace(plan.settings.hyp, fliplr=settings.hyp.fliplr))
        if newest is not None and _starts_again(plan.folder, newest, planned):
            return newest.run_id
    return new_run_id()


def _starts_again(folder: Path, newest: StoredRun, planned: RunSettings) -> bool:
    """Returns whether starting with the settings ``planned`` repeats the start of the run ``newest``: it has saved
    nothing, and its settings are the same."""
    checkpoints = [folder / "best.pt", *folder.glob("epoch*.pt")]
    has_saved = any(run_id_of(path) == newest.run_id for path in checkpoints)
    return not has_saved and is_same_start(newest.settings, planned)


def _make_folder(ctx: DistributedContext, config: TrainConfig, stack: ExitStack, progress: Progress) -> Path:
    """Creates the folder of a new run and locks it until ``stack`` is closed."""
    folder = Path(config.project) / config.name
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            absent = [path for path in (folder, *folder.parents) if not path.exists()]
            planned = folder
            folder = increment_path(config.project, config.name, config.exist_ok)
            created = absent if folder == planned else [folder]
            stack.callback(_lock(folder).release)
            stack.push(partial(_remove_after_failure, created, progress))  # while the lock is still held
            if config.resume == AUTO and checkpoint_of_newest_run(folder) is not None:  # there was no folder to lock
                raise UserError(f"{folder}: another start has trained here meanwhile; repeat the command to continue")
            _warn_of_earlier_run(folder, config.data)
    return Path(broadcast_object(ctx, folder))


def lock_folder(folder: Path, stack: ExitStack, *, patience_s: float = LOCK_PATIENCE_S) -> None:
    """Locks the folder of a run that continues, if there is one, until ``stack`` is closed. Only rank 0 calls this.

    Raises UserError when another process still trains the run after ``patience_s`` seconds, and `ReadOnlyFolder`.
    """
    if not folder.is_dir():
        return
    try:
        lock = _lock(folder, patience_s)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        reason = os_reason(error)
        raise ReadOnlyFolder(
            f"{folder}: cannot be written ({reason}), but a run continues in its own folder; copy it, and continue the "
            f"copy: cp -r {shlex.quote(str(folder))} COPY, then {resume_flag('COPY/last.pt')}"
        ) from None
    stack.callback(lock.release)


def wait_until_saved(folder: Path) -> None:
    """Waits until a process that was told to stop has saved the run in ``folder``. Raises UserError if it does not
    end."""
    if folder.is_dir():
        with FileLock(folder / LOCK_NAME) as lock:
            _acquire(lock, folder, SAVING_PATIENCE_S)


def _lock(folder: Path, patience_s: float = LOCK_PATIENCE_S) -> FileLock:
    """Locks the run in ``folder``, and returns the lock. Removes files that a killed process left half written."""
    lock = FileLock(folder / LOCK_NAME)
    _acquire(lock, folder, patience_s)
    remove_half_written(folder)
    return lock


def _acquire(lock: FileLock, folder: Path, patience_s: float) -> None:
    """Acquires the ``lock`` on the run in ``folder``. Raises UserError if another process holds it for longer than
    ``patience_s`` seconds."""
    holder = lock.acquire(patience_s)
    if holder:
        raise UserError(
            f"{folder}: another process is training this run ({holder}); wait for it, stop it, or start a new run "
            "with another --name"
        )


def _warn_of_earlier_run(folder: Path, data: str) -> None:
    """Warns about what an earlier run has left in a folder that is used again: a run on other data than ``data``, and
    periodic checkpoints."""
    earlier_data = previous_data(folder)
    if is_other_data(earlier_data, data):
        get_logger().warning(
            "%s: has a run on other data, %s, whose files stay until this run replaces them (--exist-ok)",
            folder,
            earlier_data,
        )
    checkpoints = sorted(folder.glob("epoch*.pt"), key=lambda path: (len(path.name), path.name))
    if checkpoints:
        get_logger().warning(
            "%s: has %s of an earlier run; this run overwrites those of its own epochs",
            folder,
            ", ".join(path.name for path in checkpoints),
        )


def _remove_after_failure(
    created: Sequence[Path],
    progress: Progress,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    frames: TracebackType | None,
) -> None:
    """Removes the folders that `_make_folder` created, innermost first, if an error ends a run before its first step.
    A run that took steps keeps its folder, because the log may be the only record of the failure. So does one that has
    saved: if a callback fails before the first step, the run ends with a checkpoint from which it can continue."""
    if error is None or not created:
        return
    traceback.clear_frames(frames)  # closes the files that they hold open, which may be too many
    folder, *parents = created
    if progress.updates or any(any(folder.glob(pattern)) for pattern in _FILES_WORTH_KEEPING):
        return
    shutil.rmtree(folder, ignore_errors=True)
    for parent in parents:
        with suppress(OSError):  # other runs are in it
            parent.rmdir()
