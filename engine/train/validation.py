"""How an epoch gets its scores: the ranks validate its averaged weights themselves, or leave them to the evaluating
processes (``--eval-ranks``) and train the next epoch meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.loading.loader import ValidationLoader
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.fitness import Fitness
from engine.evaluation.result import Evaluation
from engine.parallel.eval_ranks import EvalRanks, remove_weights, weights_path
from engine.train.checkpoint import RESULT_FIELDS, Checkpointer, CheckpointHeader, Progress
from engine.train.step import TrainStep
from utils.distributed.context import broadcast_object
from utils.files.results_csv import CONFIDENCE_COLUMN
from utils.files.torch_file import read_checkpoint


class EpochScores(NamedTuple):
    """The scores of an epoch, on every rank."""

    metrics: dict[str, float]  # by their names in results.csv
    class_ap: np.ndarray  # (C,)
    fitness: float
    thresholds: tuple[float | None, float | None, float | None]  # as `Progress` stores them


class Validation:
    """Validates the epochs of a run. Every rank has one and makes the same calls.

    ``header``, of `send` and `run`: that of a checkpoint taken now, if the averaged weights are still those of the
    epoch; None if steps have been taken since, so that they are in the file with which they were sent.

    Args:
        eval_ranks: the processes that validate; None: the training processes do.
    """

    def __init__(
        self,
        step: TrainStep,
        checkpointer: Checkpointer,
        folder: Path,
        *,
        loader: ValidationLoader,
        evaluator: Evaluator,
        fitness: Fitness,
        eval_ranks: EvalRanks | None,
    ) -> None:
        self.loader = loader
        self.fitness = fitness
        self._step = step
        self._ctx = step.ctx
        self._checkpointer = checkpointer
        self._folder = folder
        self._evaluator = evaluator
        self._eval_ranks = eval_ranks

    def send(self, epoch: int, *, is_closing: bool, header: CheckpointHeader | None) -> bool:
        """Leaves the averaged weights of an epoch to the evaluating processes. Returns False if there are none."""
        if self._eval_ranks is None:
            return False
        if self._ctx.is_main:
            self._checkpointer.flush()  # last.pt needs only the weights of the epoch that it names
            remove_weights(self._folder, before=epoch - 1)
            if header is not None:
                self._checkpointer.write_weights(self._step, header, weights_path(self._folder, epoch))
        self._eval_ranks.send(epoch, is_closing=is_closing)
        return True

    def run(
        self, epoch: int, *, is_closing: bool, header: CheckpointHeader | None, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Validates an epoch, or waits until the evaluating processes have. Returns the evaluation on rank 0; None on
        the others, and if ``should_stop`` says so."""
        if self._eval_ranks is not None:
            if not self._eval_ranks.has_sent(epoch):
                self.send(epoch, is_closing=is_closing, header=header)
            return self._eval_ranks.wait(epoch, should_stop)
        model = self._step.ema.module
        if header is None:  # a run with --eval-ranks continues without
            weights = read_checkpoint(weights_path(self._folder, epoch))["ema"] if self._ctx.is_main else None
            model = copy.deepcopy(model)
            model.load_state_dict(broadcast_object(self._ctx, weights))
        self._step.criterion.set_closing(is_closing)
        return self._evaluator.run(model, self.loader, should_stop=should_stop)

    def scores_of(self, evaluation: Evaluation | None) -> EpochScores | None:
        """Returns the scores in rank 0's evaluation, on every rank; None if there is none."""
        scores = None
        if evaluation is not None:
            result = evaluation.result
            metrics = {f"metrics/{name}": value for name, value in result.metrics.items()}
            if result.threshold is not None:
                metrics[CONFIDENCE_COLUMN] = result.threshold
            fitness = self.fitness.score_of(result)
            metrics[self.fitness.column] = fitness
            metrics |= {name: value for name, value in result.extras.items() if name.startswith("val/")}
            thresholds = (result.threshold, result.plain_confidence, result.scored_confidence)
            scores = EpochScores(metrics, result.class_ap, fitness, thresholds)
        return broadcast_object(self._ctx, scores)

    def save_late_best(self, epoch: int, progress: Progress, metrics: dict[str, float]) -> None:
        """Writes best.pt, on rank 0, from the weights that were sent to the evaluating processes."""
        content = read_checkpoint(weights_path(self._folder, epoch))
        results = {name: getattr(progress, name) for name in RESULT_FIELDS}
        self._checkpointer.save_best(content | {"progress": content["progress"] | results, "metrics": metrics})
