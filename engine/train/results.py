"""What follows from the result of an epoch: the best one, class weights, the row of results.csv, a line of the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from data.loading.loader import InfiniteDataLoader
from engine.evaluation.fitness import Fitness
from engine.report.trackers import Tracker
from engine.train.control import RunControl
from utils.distributed.collectives import broadcast_object
from utils.strings import counted
from utils.structures import EvalResult

log = logging.getLogger("lockstep")

EpochEnd = Callable[[int, int, EvalResult | None], None]


class EpochResults:
    """Counts the results of a run. Every rank has one and makes the same calls.

    Args:
        train_loader: with ``--image-weights`` it draws images by the scores of their classes.
        fitness: what decides which epoch is the best.
        on_epoch_end: called on every rank after each epoch, with its number, the number of all epochs, and its result
            (None on other ranks than 0, and where the epoch was not validated).

    Attributes:
        row: the newest of results.csv.
    """

    def __init__(
        self,
        control: RunControl,
        train_loader: InfiniteDataLoader,
        fitness: Fitness,
        tracker: Tracker,
        on_epoch_end: EpochEnd | None = None,
    ) -> None:
        self.fitness, self.row = fitness, dict[str, float]()
        self._control, self._progress, self._train_loader = control, control.progress, train_loader
        self._tracker, self._on_epoch_end = tracker, on_epoch_end
        self._base_weights = np.array(train_loader.class_weights) if control.run.config.image_weights else None

    def use_class_weights(self) -> None:
        """Gives the loader the class weights of the newest result, those of a resumed run too."""
        if self._base_weights is None:  # resumed without --image-weights
            self._progress.class_weights = []
        if self._progress.class_weights:
            self._train_loader.set_class_weights(np.asarray(self._progress.class_weights))

    def count(self, row: dict[str, float], result: EvalResult | None) -> tuple[bool, dict[str, float]]:
        """Updates the progress of all ranks with rank 0's result of the newest epoch, tracks and logs it. Returns
        whether the epoch is the best so far, and on rank 0 the scores by their names in results.csv.

        Args:
            row: of results.csv, without the scores, which follow the losses.
        """
        is_best = self._record(result)
        metrics = {} if result is None else self._metrics(result)
        first = {name: value for name, value in row.items() if name == "time" or name.startswith("train/")}
        self.row = {**first, **metrics, **row}
        self._tracker.epoch(self._progress.epoch, self.row)
        if metrics:
            shown = (f"{k.split('/')[-1]} {v:.4f}" for k, v in metrics.items() if k.startswith("metrics"))
            log.info("epoch %d: %s", self._progress.epoch, "  ".join(shown))
        return is_best, metrics

    def announce(self, result: EvalResult | None) -> None:
        """Calls ``on_epoch_end``, once the epoch is saved."""
        if self._on_epoch_end is not None:
            self._on_epoch_end(self._progress.epoch, self._control.epochs, result)

    def log_summary(self) -> None:
        progress, checkpointer = self._progress, self._control.checkpointer
        done = counted(progress.epoch, "epoch")
        if progress.best_epoch < 0:
            log.info("done: %s, nothing could be scored; weights: %s", done, checkpointer.last)
            return
        log.info(
            "done: %s; best %s %.4f in epoch %d: %s",
            done, self.fitness.name, progress.best_fitness, progress.best_epoch, checkpointer.best,
        )  # fmt: skip

    def _record(self, result: EvalResult | None) -> bool:
        progress = self._progress
        found = result and (self.fitness.of(result), result.class_ap, result.threshold)
        found = broadcast_object(self._control.ctx, found)
        if found is None:
            return False
        fitness, class_ap, progress.confidence = found
        is_best = progress.record_fitness(fitness, self._control.run.config.min_gain)
        if self._base_weights is not None:
            progress.class_weights = (self._base_weights * (1 - np.nan_to_num(class_ap)) ** 2).tolist()
            self.use_class_weights()
        return is_best

    def _metrics(self, result: EvalResult) -> dict[str, float]:
        losses = {k: v for k, v in result.extras.items() if k.startswith("val/")}
        metrics = {f"metrics/{k}": v for k, v in result.metrics.items()}
        return {**metrics, self.fitness.column: self.fitness.of(result), **losses}
