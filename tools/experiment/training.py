"""Runs training in a process of its own (utils/process/child.py), for commands that train several times."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from utils.config.settings import AUTO, TrainConfig
from utils.config.settings_file import settings_file
from utils.errors import UserError
from utils.files.results_csv import ResultsTable, read_columns
from utils.files.safe_io import open_direct
from utils.files.temporary_folder import temporary_folder
from utils.logger import get_logger
from utils.process.child import Child, RunResult, start_child
from utils.process.outcome import Outcome
from utils.process.stop_signals import StopSignals
from utils.program import command_prefix

POLL_S = 0.2
RETRY_S = 30.0  # wait before a lost process is started again: another program may have filled the memory meanwhile
RESULTS_CSV = "results.csv"
# File in the folder of a run, with warnings of libraries and tracebacks, including those from before a resume.
ERRORS_TXT = "errors.txt"


def train_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Returns the settings of a single training of a search or cross-validation."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


@dataclass(frozen=True)
class Pruning:
    """Ends a training early.

    ``column`` of results.csv contains the fitness. ``should_prune`` is called with the epoch and its fitness for each
    validation, including validations by previous processes, and again if a process repeats an epoch with another
    fitness. If it returns True before the last epoch, the training is pruned.
    """

    column: str
    should_prune: Callable[[int, float], bool]


def train(config: TrainConfig, folder: Path, signals: StopSignals, pruning: Pruning | None = None) -> RunResult:
    """Trains in ``folder`` in a process of its own; an existing training continues with the current settings
    (engine/train/resume.py). Returns how the training ended, now or before.

    A training that is lost (`Outcome.LOST`) is continued once, `RETRY_S` later. ``signals``: the entered signals of
    this process; they stop the training, which can be resumed.

    Raises UserError if the training is complete, but the results that ``pruning`` needs cannot be read, and `Stopped`
    if a signal arrives during the wait.
    """
    config = dataclasses.replace(config, project=str(folder.parent), name=folder.name, resume=AUTO)
    reports = EpochReports(folder / RESULTS_CSV, config.epochs, pruning)
    result = repeat_if_lost(partial(_run_process, config, folder, signals, reports), str(folder))
    if result.outcome == Outcome.LOST:
        reason = f"{folder}: {result.reason} (finished epochs are kept; the same command continues)"
        return dataclasses.replace(result, reason=reason)
    return result


def can_begin(config: TrainConfig, scratch: Path) -> bool:
    """Starts a training, without trackers but with the user's callbacks, and stops it once it has begun. Returns
    whether it began.

    ``scratch``: beside this path is a temporary folder for the training. Raises `Stopped` if a signal arrives.
    """
    with temporary_folder(scratch) as folder:
        scratch_config = dataclasses.replace(config, project=str(folder), name="run", tracker=[])
        with (
            settings_file(scratch_config) as settings,
            start_child(
                [*command_prefix("train"), settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as child,
        ):
            while child.process.poll() is None and not child.has_begun:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(POLL_S)
            return child.has_begun


def repeat_if_lost(run: Callable[[], RunResult], name: str) -> RunResult:
    """Calls ``run``, which runs a process, and returns its result. If the process is lost (`Outcome.LOST`), calls
    ``run`` once more, `RETRY_S` later. ``name``: what ``run`` does, for the log."""
    result = run()
    if result.outcome != Outcome.LOST:
        return result
    get_logger().warning("%s: %s; trying again in %.0f s", name, result.reason, RETRY_S)
    time.sleep(RETRY_S)
    return run()


def _run_process(config: TrainConfig, folder: Path, signals: StopSignals, reports: EpochReports) -> RunResult:
    """Runs a process of train.py until it ends, and returns how the training ended.

    | pruned | signal received | outcome of the training |
    | --- | --- | --- |
    | yes | yes or no | pruned, however its process ended: the fitness that decided this is known |
    | no | yes | stopped, even if its process has just ended: the next start finds that out |
    | no | no | the outcome of its process |
    """
    with (
        settings_file(config) as settings,
        open(folder / ERRORS_TXT, "ab", opener=open_direct) as errors,
        signals.deferred(),
        start_child(
            [*command_prefix("train"), settings], stop=signal.SIGKILL, stdout=subprocess.DEVNULL, stderr=errors
        ) as child,
    ):
        result = _wait(child, signals, reports)
    if result.outcome == Outcome.DONE:
        reports.report_new(is_final=True)
    if reports.is_pruned:
        return RunResult(Outcome.PRUNED)
    if signals.received:
        return RunResult(Outcome.STOPPED, code=signals.code)
    return result


def _wait(child: Child, signals: StopSignals, reports: EpochReports) -> RunResult:
    """Waits for the child to end, and returns how it ended. A signal or ``reports`` can stop it."""
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


class EpochReports:
    """Passes each fitness of an epoch in results.csv to `Pruning`, once, until that ends the training. Without one,
    does not read the file."""

    def __init__(self, table: Path, epochs: int, pruning: Pruning | None) -> None:
        self._table = table
        self._epochs = epochs  # epochs of the training
        self._pruning = pruning
        self._reported: dict[int, float] = {}  # fitness by epoch
        self.is_pruned = False

    def report_new(self, *, is_final: bool = False) -> None:
        """Reports the epochs since the last call. If the table cannot be read, raises UserError if ``is_final``, else
        leaves the epochs to a later call."""
        if self._pruning is None:
            return
        try:
            rows = list(fitness_by_epoch(self._table, self._pruning.column))
        except UserError:
            if is_final:
                raise
            return
        for epoch, fitness in rows:
            if self._reported.get(epoch) != fitness and not self.is_pruned:
                self._reported[epoch] = fitness
                self.is_pruned = self._pruning.should_prune(epoch, fitness) and epoch < self._epochs


def fitness_by_epoch(table: Path, column: str) -> Iterator[tuple[int, float]]:
    """Yields the epochs of results.csv that have a fitness, and the fitness; nothing if the file does not exist yet.
    Raises UserError if the file cannot be read."""
    columns = read_columns(table) if table.exists() else {}
    for epoch, fitness in zip(columns.get("epoch", ()), columns.get(column, ())):
        if not math.isnan(fitness):
            yield int(epoch), float(fitness)


def check_has_results(folder: Path) -> None:
    """Raises UserError if the complete training in ``folder`` has no results: its fitness is unknown."""
    table = folder / RESULTS_CSV
    if not ResultsTable.read_if_exists(table).rows:
        raise UserError(
            f"{table}: has lost the results of a complete training; restore it, or remove its folder to repeat it"
        )
