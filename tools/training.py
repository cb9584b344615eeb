"""Runs a training as a child process (`tools.child`), for commands that train several times."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.checkpoint import Checkpoint
from engine.run.folder import LOCK_NAME
from tools.child import start
from tools.continued import folder_of
from utils.config.flags import flags_of
from utils.config.search_settings import KfoldConfig
from utils.config.settings import TrainConfig
from utils.errors import REQUEUE, Stopped, UserError
from utils.files.locks import FileLock
from utils.files.results_csv import read_columns
from utils.files.safe_io import open_direct
from utils.interrupts import INTERRUPTED
from utils.logger import configure_logging, get_logger
from utils.machine.limits import DISK_FULL
from utils.machine.stop_signals import StopSignals
from utils.program import start_of

POLL_S = 0.2
PATIENCE_S = 60.0  # longest wait for a training whose parent was killed
# Files that a training writes before last.pt.
_RESULTS = "results.csv"
_SETTINGS = "settings.yaml"
_DISK_FULL = ("the disk is full", *map(os.strerror, DISK_FULL))  # phrases in error lines
ERRORS = "errors.txt"  # file in the run's folder, with warnings of libraries and the traceback of a crash


class TrainingFailed(UserError):
    """Raised when a training has failed.

    ``refused``: whether every training would fail, as the settings or the data are wrong, or the disk is full.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


def run_continued(config: KfoldConfig, work: Callable[[StopSignals], None]) -> None:
    """Calls ``work``; after a signal, logs that the same command continues it."""
    configure_logging(True)
    with StopSignals() as signals:
        try:
            work(signals)
        except Stopped:
            get_logger().info("stopped; the same command continues the work in %s", folder_of(config))
            raise


def train(
    config: TrainConfig,
    folder: Path,
    column: str,
    signals: StopSignals,
    on_epoch: Callable[[int, float], bool] = lambda epoch, fitness: True,
) -> bool:
    """Trains in ``folder``, from its last.pt if there is one. Returns False if ``on_epoch`` has ended it early.

    Args:
        column: column of results.csv with the fitness.
        signals: signals of this process, entered.
        on_epoch: called with the epoch and its fitness after each validation, also those of previous processes;
            returns whether to continue.

    Raises TrainingFailed, UserError if another process trains in ``folder``, and Stopped if a signal to this process or
    to the child has ended the training, which can be resumed.
    """
    wait_for_previous(folder)
    checkpoint, has_ended = previous_training(folder, config)
    resume = None if checkpoint is None else str(checkpoint)
    config = replace(config, project=str(folder.parent), name=folder.name, exist_ok=True, resume=resume)
    last_reported = 0
    should_continue = True

    def report_epochs() -> bool:
        """Calls ``on_epoch`` for new epochs. Returns whether to continue."""
        nonlocal last_reported, should_continue
        for epoch, fitness in fitness_by_epoch(folder / _RESULTS, column):
            if should_continue and epoch > last_reported:
                last_reported = epoch
                should_continue = on_epoch(epoch, fitness)
        return should_continue

    if has_ended:
        return report_epochs()
    with (
        signals.deferred(),
        open(folder / ERRORS, "wb", opener=open_direct) as errors,
        start(
            [*start_of("train"), *flags_of(config)], stop=signal.SIGKILL, stdout=subprocess.DEVNULL, stderr=errors
        ) as child,
    ):
        code = _wait(child.process, report_epochs, signals)
        reason = child.reason
    if not should_continue:
        return False
    if signals.stop or signals.interrupt or code in (REQUEUE, INTERRUPTED):
        raise Stopped(signals.code if signals.stop or signals.interrupt else code)
    if code:
        is_disk_full = any(phrase in reason for phrase in _DISK_FULL)
        has_begun = (folder / _SETTINGS).exists()
        raise TrainingFailed(reason, refused=code == 2 and (is_disk_full or not has_begun))
    return True


def wait_for_previous(folder: Path) -> None:
    """Waits until a training in ``folder`` whose parent was killed has saved. Raises UserError if it does not end."""
    if folder.is_dir():
        with FileLock(folder / LOCK_NAME) as lock:
            holder = lock.acquire(PATIENCE_S)
            if holder:
                raise UserError(f"{folder}: another process is training this run ({holder}); wait for it, or stop it")


def previous_training(folder: Path, config: TrainConfig) -> tuple[Path | None, bool]:
    """Returns the checkpoint in ``folder`` to resume from, if there is one, and whether its training has ended.

    Without a checkpoint, removes the files of a training that ended before its first one. Raises TrainingFailed if the
    checkpoint is damaged.
    """
    last = folder / "last.pt"
    if not last.is_file():
        for name in (_RESULTS, _SETTINGS):
            (folder / name).unlink(missing_ok=True)
        return None, False
    try:
        checkpoint = Checkpoint.read(last)
    except UserError as error:
        raise TrainingFailed(str(error)) from None
    progress = checkpoint.progress
    # A checkpoint of a run with --time has the number of epochs that fit into the time.
    epochs = checkpoint.config.epochs if config.time else config.epochs
    has_stopped_early = progress.stops_early(config.patience, epochs=epochs, val_every=config.val_every)
    return last, progress.epoch >= epochs or has_stopped_early


def _wait(child: subprocess.Popen, report_epochs: Callable[[], bool], signals: StopSignals) -> int:
    """Waits for the end of the child, which a signal or ``report_epochs`` stops. Returns its exit code."""
    is_stopping = False
    while True:
        code = child.poll()
        should_continue = report_epochs()
        if code is not None:
            return code
        if not is_stopping and (not should_continue or signals.stop or signals.interrupt):
            child.terminate()  # the training saves before it ends
            is_stopping = True
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)


def fitness_by_epoch(table: Path, column: str) -> Iterator[tuple[int, float]]:
    """Yields the epochs of results.csv that have a fitness, and the fitness; nothing if there is no file yet."""
    columns = {}
    with suppress(UserError):
        columns = read_columns(table)
    for epoch, fitness in zip(columns.get("epoch", ()), columns.get(column, ())):
        if not math.isnan(fitness):
            yield int(epoch), float(fitness)
