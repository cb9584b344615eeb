"""Logs at the end of a run the scores of each class, and where the weights are."""

from __future__ import annotations

from collections.abc import Sequence

from engine.evaluation.result import EvalResult
from engine.evaluation.tables import format_table, result_rows
from engine.hooks.hook import Epoch, Hook, Training
from utils.labels import GroundTruth
from utils.logger import get_logger
from utils.strings import counted


class ClassScores(Hook):
    """Logs the scores of best.pt by class at the end of a run, on rank 0.

    After a resume without a new best epoch, logs the scores of the newest validation, which may have been repeated only
    for its report. ``names``: class names.
    """

    def __init__(self, truth: GroundTruth, names: Sequence[str]) -> None:
        self._truth = truth
        self._names = names
        self._result: EvalResult | None = None
        self._epoch = 0  # whose result this is
        self._is_best = False  # it is of a best epoch

    def report(self, trainer: Training, epoch: Epoch) -> None:
        if epoch.evaluation is not None and (epoch.is_best or not self._is_best):
            self._result = epoch.evaluation.result
            self._epoch = epoch.number
            self._is_best = epoch.is_best

    def finish(self, trainer: Training) -> None:
        if self._result is None or not self._result.class_targets.any():
            return
        if self._epoch == trainer.progress.best_epoch:
            model = "best.pt"
        elif self._epoch == trainer.progress.epoch:
            model = "last.pt"
        else:
            model = "newest validation"
        get_logger().info("%s, after epoch %d (%s):", model, self._epoch, self._result.protocol)
        for line in format_table(result_rows(self._result, self._truth, self._names)):
            get_logger().info("%s", line)


class Summary(Hook):
    """Logs the summary of a run. The last hook."""

    def __init__(self, fitness: str) -> None:
        self._fitness = fitness

    def finish(self, trainer: Training) -> None:
        progress = trainer.progress
        checkpointer = trainer.checkpointer
        done = counted(progress.epoch, "epoch")
        if progress.best_epoch < 0:
            get_logger().info("done: %s, no epoch has a score; weights: %s", done, checkpointer.last)
            return
        weights = str(checkpointer.best)
        if not checkpointer.best.is_file():  # moved since an earlier start of the run
            weights = f"best.pt is no longer there; weights: {checkpointer.last}"
        get_logger().info(
            "done: %s; best %s %.4f in epoch %d: %s",
            done,
            self._fitness,
            progress.best_fitness,
            progress.best_epoch,
            weights,
        )
