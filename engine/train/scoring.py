"""Who scores the epochs of a run: its training processes, or with ``--eval-ranks`` the last processes of the job, while
the others train the next epochs.

The two sides have process groups of their own, and meet in the run's folder. The training processes write last.pt, from
which the evaluating processes build themselves (`engine.train.eval_process`), and the averaged weights of an epoch
into ``unscoredN.pt``. These write its scores into ``unscoredN.scores``, which the training processes read at the end of
a later epoch. The run's store only has messages (`evaluation_store`):

    run         [folder, id of the run, `program_facts`]: last.pt describes it
    epoch/K     [N, whether it is a closing epoch]: the K-th epoch to score
    scored/N    unscoredN.scores is written
    stop        exit code of a signal to an evaluating process
    failed      why an evaluating process has failed
    ended       the run has ended, however it has
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from data.loading.loader import ValidationLoader
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.result import Evaluation
from engine.evaluation.stored import read_evaluation
from engine.train.checkpoint import scores_path, weights_path
from engine.train.control import STOP_KEY, RunControl
from engine.train.step import TrainStep
from utils.distributed.agreement import program_facts
from utils.distributed.context import MAX_WAIT_S, DistributedContext, broadcast_object
from utils.distributed.join import evaluation_store
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint
from utils.logger import get_logger
from utils.strings import rank_list

MAX_PENDING = 4  # epochs whose scores other processes may still owe when the next one begins
POLL_S = 0.05  # seconds between checks for a message


class Scorer(Protocol):
    """Scores the averaged weights of epochs. Every training process has one and makes the same calls."""

    max_pending: int  # epochs whose scores the run does not wait for; 0: scores are there at once

    def open(self) -> None:
        """Begins, once last.pt describes the run."""

    def submit(self, epoch: int, *, is_closing: bool) -> None:
        """Begins to score an epoch, whose weights are in `weights_path`, or will be soon. Not called if `max_pending`
        is 0."""

    def is_ready(self, epoch: int) -> bool:
        """Returns whether the scores of an epoch are there."""

    def read(
        self, epoch: int, *, is_closing: bool, is_newest: bool, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Returns the scores of an epoch on rank 0, for which it may have to wait; None on the others, and once
        ``should_stop`` returns True.

        Args:
            is_closing: see `models.losses.base.Criterion.set_no_mosaic`.
            is_newest: the averaged weights of the run are still those of the epoch.
        """


class LocalScorer:
    """The training processes validate an epoch when its scores are read."""

    max_pending = 0

    def __init__(self, folder: Path, step: TrainStep, evaluator: Evaluator, loader: ValidationLoader) -> None:
        self._folder = folder
        self._step = step
        self._evaluator = evaluator
        self._loader = loader

    def open(self) -> None: ...

    def submit(self, epoch: int, *, is_closing: bool) -> None: ...

    def is_ready(self, epoch: int) -> bool:
        return True

    def read(
        self, epoch: int, *, is_closing: bool, is_newest: bool, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        ctx = self._step.ctx
        model = self._step.ema.module
        scores = scores_path(self._folder, epoch)  # a run with --eval-ranks continues without
        if broadcast_object(ctx, ctx.is_main and scores.exists()):
            return read_evaluation(scores) if ctx.is_main else None
        if not is_newest:
            content = read_checkpoint(weights_path(self._folder, epoch)) if ctx.is_main else {}
            model = copy.deepcopy(model)
            model.load_state_dict(broadcast_object(ctx, content.get("ema")))
        self._step.criterion.set_no_mosaic(is_closing)
        return self._evaluator.run(model, self._loader, should_stop=should_stop)


class RemoteScorer:
    """Other processes of the job validate an epoch while the training goes on."""

    max_pending = MAX_PENDING

    def __init__(self, ctx: DistributedContext, folder: Path, run_id: str, control: RunControl) -> None:
        assert ctx.store is not None, "the evaluating processes have joined the run"
        self._ctx = ctx
        self._folder = folder
        self._run_id = run_id
        self._control = control
        self._store = evaluation_store(ctx.store)
        self._submitted = 0

    def open(self) -> None:
        ctx = self._ctx
        if ctx.is_main:
            self._store.set("run", json.dumps([str(self._folder), self._run_id, program_facts()]))
            ranks = range(ctx.world_size, ctx.world_size + ctx.eval_ranks)
            get_logger().info("--eval-ranks: validation by %s while the others train", rank_list(ranks))

    def submit(self, epoch: int, *, is_closing: bool) -> None:
        self._submitted += 1
        if self._ctx.is_main:
            self._store.set(f"epoch/{self._submitted}", json.dumps([epoch, is_closing]))

    def is_ready(self, epoch: int) -> bool:
        if self._store.check(["failed"]):
            raise UserError(f"--eval-ranks: {self._store.get('failed').decode()}")
        if self._store.check([STOP_KEY]):
            self._control.receive(int(self._store.get(STOP_KEY)))
        return self._store.check([f"scored/{epoch}"])

    def read(
        self, epoch: int, *, is_closing: bool, is_newest: bool, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        deadline = time.monotonic() + MAX_WAIT_S
        while not self.is_ready(epoch):
            if time.monotonic() > deadline:
                raise UserError(f"--eval-ranks: no scores of epoch {epoch} in {MAX_WAIT_S / 3600:g} hours")
            if should_stop():
                return None
            time.sleep(POLL_S)
        return read_evaluation(scores_path(self._folder, epoch)) if self._ctx.is_main else None


def release_evaluators(ctx: DistributedContext) -> None:
    """Tells the evaluating processes, if there are any, that the run has ended, however it has."""
    if ctx.eval_ranks and ctx.is_main and ctx.store is not None:
        with suppress(dist.DistError):
            evaluation_store(ctx.store).set("ended", "")
