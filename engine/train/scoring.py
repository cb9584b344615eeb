"""Who scores the epochs of a run: its training processes, or with ``--eval-ranks`` the last processes of the job, while
the others train the next epoch.

The two sides have process groups of their own, and meet in the run's folder. The training processes write last.pt, from
which the evaluating processes build themselves (`engine.run.eval_process`), and the averaged weights of an epoch
into ``unscoredN.pt``. These write its scores into ``unscoredN.scores``, and the training processes wait for them at the
end of the next epoch. The run's store only has messages (`evaluation_store`):

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
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from data.loading.loader import ValidationLoader
from engine.evaluation.evaluator import Evaluator
from engine.evaluation.result import Evaluation
from engine.evaluation.stored import read_evaluation
from engine.train.checkpoint import UnscoredEpoch
from engine.train.control import STOP_KEY, RunControl
from engine.train.saver import Saver, scores_path, weights_path
from engine.train.step import TrainStep
from utils.distributed.agreement import program_facts
from utils.distributed.context import MAX_WAIT_S, DistributedContext, broadcast_object
from utils.distributed.join import evaluation_store
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint
from utils.logger import get_logger
from utils.strings import rank_list

POLL_S = 0.05  # seconds between checks for a message


@dataclass(frozen=True)
class LocalScorer:
    """The training processes validate an epoch, see `engine.train.ledger.Scorer`. One that an earlier start has left to
    other processes may have its scores or weights in a file."""

    saver: Saver
    control: RunControl
    step: TrainStep
    evaluator: Evaluator
    loader: ValidationLoader
    lag = 0

    def open(self) -> None: ...

    def submit(self, epoch: UnscoredEpoch) -> None: ...

    def score(self, epoch: UnscoredEpoch) -> Evaluation | None:
        ctx = self.step.ctx
        model = self.step.ema.module
        scores = scores_path(self.saver.folder, epoch.number)
        weights = weights_path(self.saver.folder, epoch.number)
        has_scores, has_weights = broadcast_object(ctx, (scores.exists(), weights.exists()))
        if has_scores:
            return read_evaluation(scores) if ctx.is_main else None
        if has_weights:
            content = read_checkpoint(weights) if ctx.is_main else {}
            model = copy.deepcopy(model)
            model.load_state_dict(broadcast_object(ctx, content.get("ema")))
        self.step.criterion.set_no_mosaic(epoch.is_closing)
        return self.evaluator.run(model, self.loader, should_stop=self.control.should_stop)


class RemoteScorer:
    """Other processes of the job validate an epoch while the next one is trained, see `engine.train.ledger.Scorer`."""

    lag = 1

    def __init__(self, ctx: DistributedContext, saver: Saver, control: RunControl) -> None:
        assert ctx.store is not None, "the evaluating processes have joined the run"
        self._ctx = ctx
        self._saver = saver
        self._control = control
        self._store = evaluation_store(ctx.store)
        self._submitted = 0

    def open(self) -> None:
        ctx = self._ctx
        if ctx.is_main:
            message = [str(self._saver.folder), self._saver.description.run_id, program_facts()]
            self._store.set("run", json.dumps(message))
            ranks = range(ctx.world_size, ctx.world_size + ctx.eval_ranks)
            get_logger().info("--eval-ranks: validation by %s while the others train", rank_list(ranks))

    def submit(self, epoch: UnscoredEpoch) -> None:
        self._submitted += 1
        if self._ctx.is_main:
            if not weights_path(self._saver.folder, epoch.number).exists():  # an earlier start may have written them
                self._saver.save_weights(epoch.number)
            self._store.set(f"epoch/{self._submitted}", json.dumps([epoch.number, epoch.is_closing]))

    def score(self, epoch: UnscoredEpoch) -> Evaluation | None:
        deadline = time.monotonic() + MAX_WAIT_S
        while not self._store.check([f"scored/{epoch.number}"]):
            if self._store.check(["failed"]):
                raise UserError(f"--eval-ranks: {self._store.get('failed').decode()}")
            if self._store.check([STOP_KEY]):
                self._control.receive(int(self._store.get(STOP_KEY)))
            if time.monotonic() > deadline:
                raise UserError(f"--eval-ranks: no scores of epoch {epoch.number} in {MAX_WAIT_S / 3600:g} hours")
            if self._control.should_stop():
                return None
            time.sleep(POLL_S)
        return read_evaluation(scores_path(self._saver.folder, epoch.number)) if self._ctx.is_main else None


def release_evaluators(ctx: DistributedContext) -> None:
    """Tells the evaluating processes, if there are any, that the run has ended, however it has."""
    if ctx.eval_ranks and ctx.is_main and ctx.store is not None:
        with suppress(dist.DistError):
            evaluation_store(ctx.store).set("ended", "")
