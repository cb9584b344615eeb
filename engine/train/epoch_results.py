"""The results of an epoch: its row of results.csv, its scores, and whether it is the best one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS
from engine.evaluation.result import EvalResult
from engine.evaluation.tables import number_text
from engine.hooks.hook import Epoch
from engine.optim.schedule import Schedule
from engine.train.checkpoint import Progress
from engine.train.step import TrainStep
from utils.distributed.context import DistributedContext, broadcast_object
from utils.files.results_csv import CONFIDENCE_COLUMN
from utils.logger import get_logger


class EpochResults:
    """Collects the results of each epoch. ``fitness`` decides which epoch is the best."""

    def __init__(self, fitness: Fitness) -> None:
        self.fitness = fitness

    def training_row(self, step: TrainStep, schedule: Schedule, progress: Progress) -> dict[str, float]:
        """Returns the columns of an epoch whose steps are done: mean losses, and the last step's learning rates."""
        losses = progress.mean_losses(step.criterion.names)
        step.optimizer.set_rates(schedule, progress.updates - 1)  # a resumed run may have taken no step
        return {f"train/{name}": value for name, value in losses.items()} | step.optimizer.rates()

    def fill_in(self, ctx: DistributedContext, epoch: Epoch, progress: Progress, *, seconds: float) -> None:
        """Fills in the row of an epoch, with its scores if it was validated. Records in ``progress`` the scores that
        the run needs later. Every rank must call this.

        ``seconds``: how long the run has trained, for a row without a time.
        """
        result = None if epoch.evaluation is None else epoch.evaluation.result
        scores = broadcast_object(ctx, None if result is None else _BroadcastScores.of(result, self.fitness))
        if scores is not None:
            progress.record_thresholds(
                confidence=scores.threshold,
                plain_confidence=scores.plain_confidence,
                scored_confidence=scores.scored_confidence,
            )
            epoch.class_ap = scores.class_ap
            epoch.is_best = progress.record_fitness(scores.fitness)
        if result is not None:
            epoch.metrics = self._metrics(result)
            self._log(epoch)
        epoch.row.setdefault("time", seconds)  # a pending epoch has the time at which it ended
        epoch.row = _in_order(epoch.row, epoch.metrics)

    def _metrics(self, result: EvalResult) -> dict[str, float]:
        """Returns the scores of a validation, by their names in results.csv."""
        metrics = {f"metrics/{name}": value for name, value in result.metrics.items()}
        if result.threshold is not None:
            metrics[CONFIDENCE_COLUMN] = result.threshold
        metrics[self.fitness.column] = self.fitness.score_of(result)
        losses = {name: value for name, value in result.extras.items() if name.startswith("val/")}
        return metrics | losses

    def _log(self, epoch: Epoch) -> None:
        columns = {f"metrics/{metric.name}": metric.column for metric in METRICS}
        columns.setdefault(self.fitness.column, self.fitness.name)
        shown = [
            f"{column} {number_text(epoch.metrics[name])}" for name, column in columns.items() if name in epoch.metrics
        ]
        get_logger().info("epoch %d: %s", epoch.number, "  ".join(shown))


@dataclass(frozen=True)
class _BroadcastScores:
    """The part of a validation result that rank 0 broadcasts."""

    fitness: float
    class_ap: np.ndarray  # (C,)
    # See `EvalResult`.
    threshold: float | None
    plain_confidence: float | None
    scored_confidence: float | None

    @staticmethod
    def of(result: EvalResult, fitness: Fitness) -> _BroadcastScores:
        return _BroadcastScores(
            fitness=fitness.score_of(result),
            class_ap=result.class_ap,
            threshold=result.threshold,
            plain_confidence=result.plain_confidence,
            scored_confidence=result.scored_confidence,
        )


def _in_order(row: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
    """Orders the columns of results.csv: the time, losses of training, ``metrics``, then the rest of ``row``."""
    ordered = {"time": row["time"]}
    ordered |= {name: value for name, value in row.items() if name.startswith("train/")}
    ordered |= metrics
    ordered |= row  # existing keys keep their position
    return ordered
