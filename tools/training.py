"""Runs a training as a child process (`tools.child`), for commands that train several times."""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
from utils.machine.stop_signals import StopSignals
from utils.program import command_prefix

POLL_S = 0.2
PATIENCE_S = 60.0  # longest wait for a training whose parent was killed
# Files that a training writes before last.pt.
_RESULTS = "results.csv"
_SETTINGS = "settings.yaml"
ERRORS = "errors.txt"  # file in the run's folder: warnings of libraries, and the traceback of a crash


class TrainingFailed(UserError):
    """Raised when a training has failed.

    ``refused``: whether every training would fail, as the settings, the data or the machine are wrong, or the disk is
    full. What the run has trained stays valid.
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
    previous = previous_training(folder, config)
    reports = _EpochReports(folder / _RESULTS, column, on_epoch)
    if previous.has_ended:
        reports.report_new()
        return reports.should_continue
    resume = None if previous.checkpoint is None else str(previous.checkpoint)
    config = replace(config, project=str(folder.parent), name=folder.name, exist_ok=True, resume=resume)
    with (
        signals.deferred(),
        open(folder / ERRORS, "wb", opener=open_direct) as errors,
        start(
            [*command_prefix("train"), *flags_of(config)], stop=signal.SIGKILL, stdout=subprocess.DEVNULL, stderr=errors
        ) as child,
    ):
        code = _wait(child.process, reports, signals)
        failure = TrainingFailed(child.reason, refused=child.has_refused or child.has_full_disk) if code else None
    if not reports.should_continue:
        return False
    is_stopped = signals.received
    if is_stopped or code in (REQUEUE, INTERRUPTED):
        raise Stopped(signals.code if is_stopped else code)
    if failure is not None:
        raise failure
    return True


class _EpochReports:
    """Passes each epoch of results.csv that has a fitness to a callback, once, until that ends the training."""

    def __init__(self, table: Path, column: str, on_epoch: Callable[[int, float], bool]) -> None:
        self._table = table
        self._column = column
        self._on_epoch = on_epoch
        self._last_epoch = 0
        self.should_continue = True

    def report_new(self) -> None:
        """Calls the callback for the epochs since the last call."""
        for epoch, fitness in fitness_by_epoch(self._table, self._column):
            if self.should_continue and epoch > self._last_epoch:
                self._last_epoch = epoch
                self.should_continue = self._on_epoch(epoch, fitness)


def wait_for_previous(folder: Path) -> None:
    """Waits until a training in ``folder`` whose parent was killed has saved. Raises UserError if it does not end."""
    if folder.is_dir():
        with FileLock(folder / LOCK_NAME) as lock:
            holder = lock.acquire(PATIENCE_S)
            if holder:
                raise UserError(f"{folder}: another process is training this run ({holder}); wait for it, or stop it")


class PreviousTraining(NamedTuple):
    """What previous processes have done in the folder of a training."""

    checkpoint: Path | None  # to resume from
    has_ended: bool


def previous_training(folder: Path, config: TrainConfig) -> PreviousTraining:
    """Finds the checkpoint in ``folder``, and whether its training has ended.

    Without a checkpoint, removes the files of a training that ended before its first one. Raises TrainingFailed if the
    checkpoint is damaged.
    """
    last = folder / "last.pt"
    if not last.is_file():
        for name in (_RESULTS, _SETTINGS):
            (folder / name).unlink(missing_ok=True)
        return PreviousTraining(None, has_ended=False)
    try:
        checkpoint = Checkpoint.read(last)
    except UserError as error:
        raise TrainingFailed(str(error)) from None
    progress = checkpoint.progress
    # A checkpoint of a run with --time has the number of epochs that fit into the time.
    epochs = checkpoint.config.epochs if config.time else config.epochs
    has_stopped_early = progress.stops_early(config.patience, epochs=epochs, val_every=config.val_every)
    return PreviousTraining(last, has_ended=progress.epoch >= epochs or has_stopped_early)


def _wait(child: subprocess.Popen, reports: _EpochReports, signals: StopSignals) -> int:
    """Waits for the end of the child, which a signal or ``reports`` stop. Returns its exit code."""
    is_stopping = False
    while True:
        code = child.poll()
        reports.report_new()
        if code is not None:
            return code
        if not is_stopping and (not reports.should_continue or signals.received):
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
