"""Runs a training in a process of its own (utils/process/child.py), for commands that train several times."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.checkpoint import Checkpoint
from engine.run.folder import LOCK_NAME
from engine.run.results_csv import ResultsTable, read_columns
from utils.config.flags import flags_of
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.files.safe_io import open_direct
from utils.process.child import Child, Outcome, RunResult, start
from utils.process.stop_signals import StopSignals
from utils.program import command_prefix

POLL_S = 0.2
PATIENCE_S = 60.0  # longest wait for a training whose parent was killed
# Files that a training writes before last.pt.
_RESULTS = "results.csv"
_SETTINGS = "settings.yaml"
# In the folder of a run: warnings of libraries, and tracebacks, those before a resume included.
ERRORS = "errors.txt"


def train_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Returns the settings of a single training of a search or cross-validation."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


def train(
    config: TrainConfig,
    folder: Path,
    column: str,
    signals: StopSignals,
    should_prune: Callable[[int, float], bool] = lambda epoch, fitness: False,
) -> RunResult:
    """Trains in ``folder``, from its last.pt if there is one. Returns how the training has ended, now or before.

    Args:
        column: column of results.csv with the fitness.
        signals: signals of this process, entered. They stop the training, which can be resumed.
        should_prune: called with the epoch and its fitness after each validation, also those of previous processes. If
            it returns True before the last epoch, the training is pruned.

    Raises UserError if another process trains in ``folder``.
    """
    wait_for_previous(folder)
    try:
        previous = previous_training(folder, config)
    except UserError as error:
        return RunResult(Outcome.FAILED, str(error))
    reports = _EpochReports(folder / _RESULTS, column, config.epochs, should_prune)
    result = RunResult(Outcome.DONE)
    if previous.has_ended:
        reports.report_new()
    else:
        resume = None if previous.checkpoint is None else str(previous.checkpoint)
        config = dataclasses.replace(config, project=str(folder.parent), name=folder.name, exist_ok=True, resume=resume)
        result = _train_in_child(config, folder / ERRORS, reports, signals)
    return RunResult(Outcome.PRUNED) if reports.is_pruned else result


def _train_in_child(config: TrainConfig, errors: Path, reports: _EpochReports, signals: StopSignals) -> RunResult:
    """Trains in a process of its own, until its end, a signal or ``reports``. Returns how it has ended.

    ``errors``: file to which its standard error is appended.
    """
    command = [*command_prefix("train"), *flags_of(config)]
    with (
        signals.deferred(),
        open(errors, "ab", opener=open_direct) as file,
        start(command, stop=signal.SIGKILL, stdout=subprocess.DEVNULL, stderr=file) as child,
    ):
        result = _wait(child, reports, signals)
    return RunResult(Outcome.STOPPED, code=signals.code) if signals.received else result


class _EpochReports:
    """Passes each epoch of results.csv that has a fitness to a callback, once, until that ends the training."""

    def __init__(self, table: Path, column: str, epochs: int, should_prune: Callable[[int, float], bool]) -> None:
        self._table = table
        self._column = column
        self._epochs = epochs  # of the training
        self._should_prune = should_prune
        self._last_epoch = 0
        self.is_pruned = False

    def report_new(self) -> None:
        """Calls the callback for the epochs since the last call."""
        for epoch, fitness in fitness_by_epoch(self._table, self._column):
            if epoch > self._last_epoch and not self.is_pruned:
                self._last_epoch = epoch
                should_prune = self._should_prune(epoch, fitness)
                self.is_pruned = should_prune and epoch < self._epochs


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

    Without a checkpoint, removes the files of a training that ended before its first one. Raises UserError if the
    checkpoint is damaged, or if there were some: a training saves one at the end of each epoch.
    """
    last = folder / "last.pt"
    if not last.is_file():
        num_epochs = len(ResultsTable.read_if_exists(folder / _RESULTS).rows)
        if num_epochs > 1:
            raise UserError(
                f"{folder}: has results of {num_epochs} epochs, but no last.pt from which they continue; restore it, "
                "or move this folder elsewhere to train anew"
            )
        for name in (_RESULTS, _SETTINGS):
            (folder / name).unlink(missing_ok=True)
        return PreviousTraining(None, has_ended=False)
    checkpoint = Checkpoint.read(last)
    progress = checkpoint.header.progress
    # A checkpoint of a run with --time has the number of epochs that fit into the time.
    epochs = checkpoint.description.config.epochs if config.time else config.epochs
    has_stopped_early = progress.stops_early(config.patience, epochs=epochs, val_every=config.val_every)
    return PreviousTraining(last, has_ended=progress.epoch >= epochs or has_stopped_early)


def _wait(child: Child, reports: _EpochReports, signals: StopSignals) -> RunResult:
    """Waits for the end of the child, which a signal or ``reports`` stop."""
    is_stopping = False
    while True:
        result = child.poll()
        reports.report_new()
        if result is not None:
            return result
        if not is_stopping and (reports.is_pruned or signals.received):
            child.process.terminate()  # the training saves before it ends
            is_stopping = True
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(POLL_S)


def fitness_by_epoch(table: Path, column: str) -> Iterator[tuple[int, float]]:
    """Yields the epochs of results.csv that have a fitness, and the fitness; nothing if there is no file yet."""
    columns = {}
    with suppress(UserError):
        columns = read_columns(table)
    for epoch, fitness in zip(columns.get("epoch", ()), columns.get(column, ())):
        if not math.isnan(fitness):
            yield int(epoch), float(fitness)
