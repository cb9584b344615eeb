"""The ledger of a run's epochs: their rows and scores, which of them is the best, and which have no scores yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS
from engine.evaluation.result import EvalResult, Evaluation
from engine.evaluation.tables import number_text
from engine.train.checkpoint import Progress, UnscoredEpoch
from engine.train.control import RunControl
from utils.distributed.context import DistributedContext, broadcast_object
from utils.files.results_csv import CONFIDENCE_COLUMN, ResultsTable
from utils.logger import get_logger


@dataclass
class Epoch(UnscoredEpoch):
    """An epoch after its last step: unscored, then with the results of its validation, if there was one."""

    evaluation: Evaluation | None = None  # on rank 0
    class_ap: np.ndarray | None = None  # (C,)
    metrics: dict[str, float] = field(default_factory=dict)  # by their names in results.csv
    is_best: bool = False


@dataclass(frozen=True)
class LedgerState:
    """What last.pt has of a ledger; by default, that of a new run."""

    rows: Sequence[dict[str, float]] = ()
    metrics: dict[str, float] = field(default_factory=dict)  # scores of the averaged weights
    unscored: Sequence[UnscoredEpoch] = ()
    seconds: float = 0.0  # how long the run has trained


class Scorer(Protocol):
    """Scores the averaged weights of epochs. Every training process has one and makes the same calls."""

    lag: int  # epochs whose scores may be missing when the next one begins: 1 if other processes score them, else 0

    def open(self) -> None:
        """Begins, once last.pt describes the run."""

    def submit(self, epoch: UnscoredEpoch) -> None:
        """Lets an epoch be scored, whose weights are those of the run or in `weights_path`."""

    def score(self, epoch: UnscoredEpoch) -> Evaluation | None:
        """Returns the scores of an epoch on rank 0, for which it may have to wait; None on the others, and after a
        signal."""


class EpochLedger:
    """Records the epochs of a run, in their order. Every rank has one and makes the same calls.

    Attributes:
        fitness: decides which epoch is the best.
        table: the rows of results.csv.
        unscored: complete epochs without scores, the oldest first. When the next epoch begins, there are as many as the
            scorer's ``lag``.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        progress: Progress,
        fitness: Fitness,
        scorer: Scorer,
        control: RunControl,
        state: LedgerState = LedgerState(),
    ) -> None:
        """``progress``: position and best epoch of the run."""
        self.progress = progress
        self.table = ResultsTable.of(state.rows)
        self.unscored = [Epoch(**vars(epoch)) for epoch in state.unscored]
        self._ctx = ctx
        self.fitness = fitness
        self._scorer = scorer
        self._control = control
        self._newest = Epoch(progress.epoch, metrics=state.metrics)  # the newest epoch with its scores
        self._started = time.monotonic() - state.seconds  # as if there had been no interruption

    def seconds(self) -> float:
        """Returns how long the run has trained, over all its starts."""
        return time.monotonic() - self._started

    @property
    def metrics(self) -> dict[str, float]:
        """Scores of the averaged weights as they are now; empty once a step has been taken since."""
        is_current = self._newest.number == self.progress.epoch and self.progress.batch == 0
        return self._newest.metrics if is_current else {}

    @property
    def next_row(self) -> int:
        """The next epoch that gets a row, from 1."""
        return self.unscored[0].number if self.unscored else self.progress.epoch + 1

    def open(self) -> None:
        """Lets the scorer begin, with the epochs that an earlier start has left. last.pt describes the run."""
        self._scorer.open()
        for epoch in self.unscored:
            self._submit(epoch)

    def add(self, epoch: Epoch) -> None:
        """Adds an epoch after its last step, and lets it be scored."""
        self.unscored.append(epoch)
        self._submit(epoch)

    def _submit(self, epoch: Epoch) -> None:
        if epoch.is_validated:
            self._scorer.submit(epoch)

    def finish(self, *, is_last: bool) -> list[Epoch]:
        """Records the epochs whose scores are due, and returns them, the oldest first: all if the run may end here
        (``is_last``), else all but those that may wait until the next epoch ends. After a signal the others are left to
        a resumed run."""
        recorded: list[Epoch] = []
        while self.unscored:
            epoch = self.unscored[0]
            if epoch.is_validated:
                if not is_last and len(self.unscored) <= self._scorer.lag:
                    epoch.row.setdefault("time", self.seconds())
                    break
                epoch.evaluation = self._scorer.score(epoch)
                if self._control.stops_after_validation():
                    break
            self._record(epoch)
            recorded.append(self.unscored.pop(0))
        return recorded

    def _record(self, epoch: Epoch) -> None:
        """Completes the row of an epoch with its scores, if it was validated, and keeps those that the run needs."""
        scores = None
        if epoch.evaluation is not None:  # on rank 0
            result = epoch.evaluation.result
            scores = (self._metrics_of(result), result.class_ap, result.threshold)
        scores = broadcast_object(self._ctx, scores)
        if scores is not None:
            epoch.metrics, epoch.class_ap, self.progress.confidence = scores
            score = epoch.metrics[self.fitness.column]
            epoch.is_best = self.progress.record_fitness(epoch.number, score, ap=epoch.metrics["metrics/AP"])
            columns = {f"metrics/{metric.name}": metric.column for metric in METRICS}
            columns.setdefault(self.fitness.column, self.fitness.name)
            shown = [f"{title} {number_text(epoch.metrics[name])}" for name, title in columns.items()]
            get_logger().info("epoch %d: %s", epoch.number, "  ".join(shown))
        losses = {name: value for name, value in epoch.row.items() if name.startswith("train/")}
        epoch.row = {"time": self.seconds(), **losses, **epoch.metrics, **epoch.row}  # the order of the columns
        self.table.add(epoch.number, epoch.row)
        self._newest = Epoch(epoch.number, metrics=epoch.metrics)  # its detections may take gigabytes

    def _metrics_of(self, result: EvalResult) -> dict[str, float]:
        """Returns the scores of a validation, by their names in results.csv."""
        metrics = {f"metrics/{name}": value for name, value in result.metrics.items()}
        if result.threshold is not None:
            metrics[CONFIDENCE_COLUMN] = result.threshold
        metrics[self.fitness.column] = self.fitness.score_of(result)
        return metrics | {name: value for name, value in result.extras.items() if name.startswith("val/")}
