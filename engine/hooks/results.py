"""What follows from the result of an epoch: its row, the best epoch, class weights, and the log at the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.loading.loader import InfiniteDataLoader
from engine.checkpoint.progress import Progress
from engine.evaluation.metrics import METRICS, Fitness
from engine.evaluation.tables import format_table, result_rows
from engine.hooks.hook import Epoch, Hook, Training
from utils.distributed.context import broadcast_object
from utils.files.results_csv import CONFIDENCE_COLUMN
from utils.strings import counted
from utils.structures import EvalResult, GroundTruth

log = logging.getLogger("lockstep")


class EpochResults(Hook):
    """Records the result of each epoch in the progress of all ranks. ``fitness`` decides which epoch is the best."""

    def __init__(self, fitness: Fitness) -> None:
        self.fitness = fitness

    def after_last_step(self, trainer: Training, epoch: Epoch) -> None:
        losses = trainer.progress.mean_losses(trainer.step.criterion.names)
        epoch.row |= {f"train/{name}": value for name, value in losses.items()}
        optimizer = trainer.step.optimizer
        optimizer.set_rates(trainer.schedule, trainer.progress.updates - 1)  # a resumed run may have taken no step
        epoch.row |= optimizer.rates()

    def score(self, trainer: Training, epoch: Epoch) -> None:
        scores = None
        if epoch.result is not None:
            scores = _SharedScores.of(epoch.result, self.fitness)
        scores = broadcast_object(trainer.ctx, scores)
        if scores is not None:
            scores.store_thresholds_in(trainer.progress)
            epoch.class_ap = scores.class_ap
            epoch.is_best = trainer.progress.record_fitness(scores.fitness)
        if epoch.result is not None:
            epoch.metrics = self._metrics(epoch.result)
            self._log(epoch)
        epoch.row.setdefault("time", trainer.seconds())  # a pending epoch has the time at which it ended
        epoch.row = _in_order(epoch.row, epoch.metrics)

    def _metrics(self, result: EvalResult) -> dict[str, float]:
        """Returns the scores of a validation, by their names in results.csv."""
        metrics = {f"metrics/{name}": value for name, value in result.metrics.items()}
        if result.threshold is not None:
            metrics[CONFIDENCE_COLUMN] = result.threshold
        metrics[self.fitness.column] = self.fitness.of(result)
        losses = {name: value for name, value in result.extras.items() if name.startswith("val/")}
        return metrics | losses

    def _log(self, epoch: Epoch) -> None:
        columns = {f"metrics/{metric.name}": metric.column for metric in METRICS}
        columns.setdefault(self.fitness.column, self.fitness.name)
        shown = [f"{column} {epoch.metrics[name]:.4f}" for name, column in columns.items() if name in epoch.metrics]
        log.info("epoch %d: %s", epoch.number, "  ".join(shown))


@dataclass(frozen=True)
class _SharedScores:
    """The part of a validation result that all ranks get; the whole result is on rank 0 only."""

    fitness: float
    class_ap: np.ndarray  # (C,)
    # See `EvalResult`.
    threshold: float | None
    plain_confidence: float | None
    scored_confidence: float | None

    @staticmethod
    def of(result: EvalResult, fitness: Fitness) -> _SharedScores:
        return _SharedScores(
            fitness=fitness.of(result),
            class_ap=result.class_ap,
            threshold=result.threshold,
            plain_confidence=result.plain_confidence,
            scored_confidence=result.scored_confidence,
        )

    def store_thresholds_in(self, progress: Progress) -> None:
        """Stores the thresholds in the progress of the run."""
        progress.confidence = self.threshold
        progress.plain_confidence = self.plain_confidence
        progress.scored_confidence = self.scored_confidence


def _in_order(row: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
    """Orders the columns of results.csv: the time, losses of training, ``metrics``, then the rest of ``row``."""
    ordered = {"time": row["time"]}
    ordered |= {name: value for name, value in row.items() if name.startswith("train/")}
    ordered |= metrics
    ordered |= row  # what is there already keeps its place
    return ordered


class ClassWeights(Hook):
    """``--image-weights``: images of classes with a low AP in the newest validation are drawn more often. ``loader``
    has the weights of a run that has not been validated yet."""

    decides_next_epoch = True

    def __init__(self, loader: InfiniteDataLoader) -> None:
        self._base = np.array(loader.class_weights)

    def start(self, trainer: Training) -> None:
        if trainer.progress.class_weights:  # of a resumed run
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))

    def record(self, trainer: Training, epoch: Epoch) -> None:
        if epoch.class_ap is not None:
            trainer.progress.class_weights = (self._base * (1 - np.nan_to_num(epoch.class_ap)) ** 2).tolist()
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))


class ClassScores(Hook):
    """Logs the scores of best.pt by class at the end of a run, on rank 0.

    After a resume without a new best epoch, logs those of the newest validation. ``names``: of the classes.
    """

    def __init__(self, truth: GroundTruth, names: Sequence[str]) -> None:
        self._truth = truth
        self._names = names
        self._best: Epoch | None = None
        self._newest: Epoch | None = None

    def record(self, trainer: Training, epoch: Epoch) -> None:
        if epoch.result is not None:
            self._newest = epoch
        if epoch.is_best:
            self._best = epoch

    def finish(self, trainer: Training) -> None:
        shown = self._best or self._newest
        if shown is None or shown.result is None or not shown.result.class_targets.any():
            return
        if shown.number == trainer.progress.best_epoch:
            model = "best.pt"
        elif shown.number == trainer.progress.epoch:
            model = "last.pt"
        else:
            model = "newest validation"
        log.info("%s, after epoch %d:", model, shown.number)
        for line in format_table(result_rows(shown.result, self._truth, self._names)):
            log.info("%s", line)


class Summary(Hook):
    """The last line of the log. Comes after all other hooks."""

    def __init__(self, fitness: str) -> None:
        self._fitness = fitness

    def finish(self, trainer: Training) -> None:
        progress = trainer.progress
        checkpointer = trainer.checkpointer
        done = counted(progress.epoch, "epoch")
        if progress.best_epoch < 0:
            log.info("done: %s, nothing could be scored; weights: %s", done, checkpointer.last)
        else:
            log.info(
                "done: %s; best %s %.4f in epoch %d: %s",
                done,
                self._fitness,
                progress.best_fitness,
                progress.best_epoch,
                checkpointer.best.path,
            )
