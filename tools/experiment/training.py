"""Runs training in a process of its own (utils/process/child.py), for commands that train several times."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.config.settings import AUTO, TrainConfig
from utils.config.settings_file import settings_file
from utils.errors import UserError
from utils.files.results_csv import ResultsTable, read_columns
from utils.files.safe_io import open_direct
from utils.process.child import RunResult, start_child
from utils.process.signals import StopSignals
from utils.program import command_prefix

POLL_S = 0.2
RESULTS_CSV = "results.csv"
# File in the folder of a run, with warnings of libraries and tracebacks, including those from before a resume.
ERRORS_TXT = "errors.txt"


def train_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Returns the settings of a single training of a search or cross-validation."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


@dataclass(frozen=True)
class TrainingResult(RunResult):
    """How a training ended."""

    is_pruned: bool = False  # its fitness ended it early; the code is 0


@dataclass(frozen=True)
class Pruning:
    """Ends a training early.

    ``column`` of results.csv contains the fitness. ``should_prune`` is called with the epoch and its fitness for each
    validation, including validations by previous processes, and again if a process repeats an epoch with another
    fitness. If it returns True before the last epoch, the training is pruned.
    """

    column: str
    should_prune: Callable[[int, float], bool]


def train(config: TrainConfig, folder: Path, signals: StopSignals, pruning: Pruning | None = None) -> TrainingResult:
    """Trains in ``folder`` in a process of its own, or continues the training there (``--resume auto``). Returns how
    the training ended, now or before. ``signals``: the entered signals of this process; they stop the training, which
    can be resumed.

    Raises UserError if the training is complete, but the results that ``pruning`` needs cannot be read.
    """
    config = dataclasses.replace(config, project=str(folder.parent), name=folder.name, resume=AUTO)
    reports = EpochReports(folder / RESULTS_CSV, config.epochs, pruning)
    with (
        settings_file(config) as settings,
        open(folder / ERRORS_TXT, "ab", opener=open_direct) as errors,
        signals.deferred(),
        start_child(
            [*command_prefix("train"), settings], stop=signal.SIGKILL, stdout=subprocess.DEVNULL, stderr=errors
        ) as child,
    ):
        is_stopping = False
        result = child.poll()
        while result is None:
            reports.report_new()
            if not is_stopping and (reports.is_pruned or signals.received):
                child.process.terminate()  # the training saves before it ends
                is_stopping = True
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(POLL_S)
            result = child.poll()
    reports.report_new(is_final=result.code == 0)
    if reports.is_pruned:  # however its process ended: the fitness that decided this is known
        return TrainingResult(is_pruned=True)
    if signals.received:  # even if its process has just ended: the next start finds that out
        return TrainingResult(signals.code)
    return TrainingResult(result.code, result.values, result.reason)


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
