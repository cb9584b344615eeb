"""Runs a training in a process of its own (utils/process/child.py), for commands that train several times."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.run.results_csv import ResultsTable, read_columns
from utils.config.settings import AUTO, TrainConfig
from utils.config.settings_file import settings_file
from utils.errors import UserError
from utils.files.safe_io import open_direct
from utils.process.child import Child, Outcome, RunResult, start
from utils.process.stop_signals import StopSignals
from utils.program import command_prefix

POLL_S = 0.2
RESULTS_CSV = "results.csv"
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
    """Trains in ``folder`` in a process of its own; a training that is there already continues with the settings of now
    (engine/run/continuation.py). Returns how it has ended, now or before.

    Args:
        column: column of results.csv with the fitness.
        signals: signals of this process, entered. They stop the training, which can be resumed.
        should_prune: called with the epoch and its fitness after each validation, also those of previous processes. If
            it returns True before the last epoch, the training is pruned.
    """
    config = dataclasses.replace(config, project=str(folder.parent), name=folder.name, resume=AUTO)
    reports = _EpochReports(folder / RESULTS_CSV, column, config.epochs, should_prune)
    with (
        signals.deferred(),
        settings_file(config) as settings,
        open(folder / ERRORS, "ab", opener=open_direct) as errors,
        start(
            [*command_prefix("train"), settings], stop=signal.SIGKILL, stdout=subprocess.DEVNULL, stderr=errors
        ) as child,
    ):
        result = _wait(child, reports, signals)
    return _end_of_training(result, signals, is_pruned=reports.is_pruned)


def _end_of_training(result: RunResult, signals: StopSignals, *, is_pruned: bool) -> RunResult:
    """Returns how the training has ended whose process has ended with ``result``.

    | pruned | a signal came | the training |
    | --- | --- | --- |
    | yes | either | is pruned, however its process has ended: it has the fitness for which it was pruned |
    | no | yes | is stopped, even if its process has just ended: the next start finds that out |
    | no | no | has ended as its process has |
    """
    if is_pruned:
        return RunResult(Outcome.PRUNED)
    if signals.received:
        return RunResult(Outcome.STOPPED, code=signals.code)
    return result


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
        """Calls the callback for the epochs since the last call. Raises UserError if the table cannot be read."""
        self._report(list(fitness_by_epoch(self._table, self._column)))

    def report_readable(self) -> None:
        """Does the same, but leaves a table that cannot be read at the moment to a later call."""
        rows: list[tuple[int, float]] = []
        with suppress(UserError):
            rows = list(fitness_by_epoch(self._table, self._column))
        self._report(rows)

    def _report(self, rows: Sequence[tuple[int, float]]) -> None:
        for epoch, fitness in rows:
            if epoch > self._last_epoch and not self.is_pruned:
                self._last_epoch = epoch
                self.is_pruned = self._should_prune(epoch, fitness) and epoch < self._epochs


def _wait(child: Child, reports: _EpochReports, signals: StopSignals) -> RunResult:
    """Waits for the end of the child, which a signal or ``reports`` stop. Raises UserError if the training is complete,
    but its results cannot be read."""
    is_stopping = False
    while True:
        result = child.poll()
        if result is not None and result.outcome == Outcome.DONE:
            reports.report_new()
        else:
            reports.report_readable()
        if result is not None:
            return result
        if not is_stopping and (reports.is_pruned or signals.received):
            child.process.terminate()  # the training saves before it ends
            is_stopping = True
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(POLL_S)


def fitness_by_epoch(table: Path, column: str) -> Iterator[tuple[int, float]]:
    """Yields the epochs of results.csv that have a fitness, and the fitness; nothing if there is no file yet. Raises
    UserError if the file cannot be read."""
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
