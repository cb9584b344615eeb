"""Who scores the epochs of a run: the training processes themselves, or others while they train (``--eval-ranks``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from data.loading.loader import ValidationLoader
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.result import Evaluation
from engine.parallel.eval_ranks import EvalRanks
from engine.train.checkpoint import weights_path
from engine.train.step import TrainStep
from utils.distributed.context import broadcast_object
from utils.files.torch_file import read_checkpoint

MAX_LATE = 4  # epochs whose scores other processes may still owe when the next one begins


class Scorer(Protocol):
    """Scores the averaged weights of epochs. Every training process has one and makes the same calls."""

    max_late: int  # epochs that may wait for their scores while the run goes on; 0: scores are there at once

    def submit(self, epoch: int, *, is_closing: bool) -> None:
        """Begins to score an epoch, whose weights are in `weights_path`, or will be soon. Not called if `max_late` is
        0."""

    def is_ready(self, epoch: int) -> bool:
        """Returns whether the scores of an epoch have come."""

    def read(
        self, epoch: int, *, is_closing: bool, is_newest: bool, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Returns the scores of an epoch on rank 0, for which it may have to wait; None on the others, and once
        ``should_stop`` returns True.

        Args:
            is_closing: see `models.losses.base.Criterion.set_closing`.
            is_newest: the averaged weights of the run are still those of the epoch.
        """


class LocalScorer:
    """The training processes validate an epoch when its scores are read."""

    max_late = 0

    def __init__(self, folder: Path, step: TrainStep, evaluator: Evaluator, loader: ValidationLoader) -> None:
        self._folder = folder
        self._step = step
        self._evaluator = evaluator
        self._loader = loader

    def submit(self, epoch: int, *, is_closing: bool) -> None: ...

    def is_ready(self, epoch: int) -> bool:
        return True

    def read(
        self, epoch: int, *, is_closing: bool, is_newest: bool, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        ctx = self._step.ctx
        model = self._step.ema.module
        if not is_newest:  # a run with --eval-ranks continues without
            content = read_checkpoint(weights_path(self._folder, epoch)) if ctx.is_main else {}
            model = copy.deepcopy(model)
            model.load_state_dict(broadcast_object(ctx, content.get("ema")))
        self._step.criterion.set_closing(is_closing)
        return self._evaluator.run(model, self._loader, should_stop=should_stop)


class RemoteScorer:
    """Other processes of the job validate an epoch while the training goes on."""

    max_late = MAX_LATE

    def __init__(self, folder: Path, eval_ranks: EvalRanks) -> None:
        self._folder = folder
        self._eval_ranks = eval_ranks

    def submit(self, epoch: int, *, is_closing: bool) -> None:
        self._eval_ranks.send(epoch, weights_path(self._folder, epoch), is_closing=is_closing)

    def is_ready(self, epoch: int) -> bool:
        return self._eval_ranks.has_scores(epoch)

    def read(
        self, epoch: int, *, is_closing: bool, is_newest: bool, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        return self._eval_ranks.wait(epoch, should_stop)
