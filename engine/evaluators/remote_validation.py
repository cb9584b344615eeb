"""``--eval-ranks``: the last processes of a job validate the averaged weights while the others train.

Both have process groups of their own, so the loss of an evaluating process (evaluating_process.py) cannot break a
collective of the training ones. They exchange messages in the run's store: rank 0 posts what the others need to
know of the run, then the weights of an epoch whenever they are free, and finds their scores there an epoch later.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from data.index.index import DatasetIndex
from data.loading.build import data_facts
from engine.checkpoint.checkpoint import Checkpoint, Progress, weights_part
from engine.checkpoint.checkpointer import copied
from engine.evaluation.evaluator import Evaluator
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.hooks.results import Validation
from engine.hooks.stopping import has_stalled
from utils.config.settings import TrainConfig
from utils.distributed.agreement import product_version
from utils.distributed.context import DistributedContext, broadcast_object
from utils.distributed.rendezvous import evaluators
from utils.distributed.store_barrier import has_died
from utils.errors import UserError
from utils.files.checkpoint import read_checkpoint
from utils.files.schema import check
from utils.logger import get_logger
from utils.strings import rank_list
from utils.structures import EvalResult

POLL_S = 0.05
# How long rank 0 waits for scores that are late: seconds, or a fraction of the time since it has sent the weights.
LATE_S, LATE_FRACTION = 5.0, 0.1
LEAVE_S = 2.0
_PIECE_BYTES = 4 << 20  # the store takes at most 8 MiB at once
OF_RESULTS = ("best_fitness", "best_epoch", "confidence", "plain_confidence", "scored_confidence")  # of `Progress`


def post_message(store: dist.Store, key: str, message: Any) -> None:
    """Stores ``message``, with tensors on the CPU, as ``key``, pickled like an object of torch.distributed.

    Nobody waits for the reader, who may have died or be stopped. A send, a collective, and the rendezvous of
    torch.distributed.rpc would wait.
    """
    content = memoryview(pickle.dumps(message))
    starts = range(0, len(content), _PIECE_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", bytes(content[start : start + _PIECE_BYTES]))
    store.set(key, str(len(starts)))  # last: the message is complete


def read_message(store: dist.Store, key: str) -> Any:
    """The message; None if it has not been posted. It stays in the store."""
    if not store.check([key]):
        return None
    return pickle.loads(b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key)))))


def discard_message(store: dist.Store, key: str) -> None:
    """Frees the memory of a posted message."""
    number = int(store.get(key))
    store.delete_key(key)
    for piece in range(number):
        store.delete_key(f"{key}/{piece}")


class Evaluators:
    """The evaluating processes, as the training ones see them. Each of these has one and makes the same calls. Its
    ``evaluator`` gets the detections and the preview, as if it had validated itself."""

    def __init__(self, ctx: DistributedContext, evaluator: Evaluator, setup: dict[str, Any]) -> None:
        self._ctx, self._evaluator, self._store = ctx, evaluator, evaluators(ctx.store)
        self._number = self._epoch = 0  # of the newest message with weights, from 1, and of its epoch
        self._sent_at, self._is_busy = 0.0, False
        self._failure = ""  # why there will be no more scores
        self._ranks = range(ctx.world_size, ctx.world_size + ctx.eval_ranks)
        if ctx.is_main:
            post_message(self._store, "setup", setup)
            get_logger().info("--eval-ranks: validation by %s while the others train", rank_list(self._ranks))

    def is_free(self) -> bool:
        """Whether the evaluating processes take the weights of an epoch now."""
        is_free = False
        if self._ctx.is_main:
            if self._is_busy and self._store.check([f"scores/{self._number}"]):
                self._receive()  # too late
            self._find_failure()
            are_ready = self._store.check([f"ready/{rank}" for rank in range(self._ctx.eval_ranks)])
            is_free = are_ready and not self._is_busy and not self._failure
        return broadcast_object(self._ctx, is_free)

    def send(self, epoch: int, weights: dict[str, Tensor] | None, *, closing: bool) -> None:
        """Sends the averaged weights of an epoch, on the CPU of rank 0, in the background. ``closing``: see
        `Criterion.set_closing`."""
        if not self._ctx.is_main:
            return
        self._number, self._epoch, self._is_busy, self._sent_at = self._number + 1, epoch, True, time.monotonic()
        key, message = f"weights/{self._number}", {"ema": weights, "closing": closing}

        def post() -> None:
            with suppress(dist.DistError):  # the run has ended meanwhile
                post_message(self._store, key, message)

        threading.Thread(target=post, name="weights", daemon=True).start()

    def collect(self, should_stop: Callable[[], bool]) -> EvalResult | None:
        """On rank 0, the scores of the epoch that was sent last; None if there are none in time, and elsewhere."""
        if not self._is_busy:
            return None
        patience_s = max(LATE_S, LATE_FRACTION * (time.monotonic() - self._sent_at))
        deadline = time.monotonic() + patience_s
        while not self._store.check([f"scores/{self._number}"]):
            self._find_failure()
            if self._failure or should_stop():
                return None
            if time.monotonic() > deadline:
                text = "--eval-ranks: no scores for epoch %d in time; the training processes validate it instead"
                get_logger().warning(text, self._epoch)
                return None
            time.sleep(POLL_S)
        scores = self._receive()
        self._evaluator.preview = scores["preview"]
        self._evaluator.detections = scores["detections"]
        self._evaluator.shown = scores["shown"]
        return scores["result"]

    def _receive(self) -> dict[str, Any]:
        scores = read_message(self._store, f"scores/{self._number}")
        discard_message(self._store, f"scores/{self._number}")
        discard_message(self._store, f"weights/{self._number}")
        self._is_busy = False
        return scores

    def _find_failure(self) -> None:
        """Notes and logs, once, that an evaluating process has ended."""
        if self._failure:
            return
        dead = [rank for rank in self._ranks if has_died(self._ctx.store.get(f"process/{rank}").decode())]
        if self._store.check(["failed"]):
            self._failure = self._store.get("failed").decode()
        elif dead:
            self._failure = f"{rank_list(dead)} has ended"
        if self._failure:
            text = "--eval-ranks: %s; the training processes validate from now on"
            get_logger().warning(text, self._failure)

    def close(self) -> None:
        """Ends the evaluating processes, and waits a moment for it: rank 0 may host the store that they read from."""
        if not self._ctx.is_main:
            return
        deadline = time.monotonic() + LEAVE_S
        with suppress(dist.DistError):
            self._store.set("ended", "")
            while not self._failure and self._store.add("left", 0) < self._ctx.eval_ranks:
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)


@dataclass
class _Pending:
    """The newest completed epoch, until its scores have come, and what is saved with them."""

    epoch: Epoch
    is_closing: bool  # see `models.losses.base.Criterion.set_closing`
    progress: Progress  # after the epoch
    ema: dict[str, Tensor]  # on the CPU of rank 0


class _StoredEpoch(TypedDict):
    """`_Pending` in a checkpoint."""

    row: dict[str, float]
    is_closing: bool
    progress: Progress
    ema: dict[str, Tensor]


class RemoteValidation(Hook):
    """Lets the evaluating processes validate. The result of an epoch counts at the end of the next one, as it would
    have at its own end. The training processes validate an epoch that may be the last, or whose scores are late. Comes
    before `Validation`.

    ``checkpoint``: of a resumed run; its newest epoch may be pending. Raises UserError for settings that need the
    scores of an epoch before the next one begins.
    """

    def __init__(self, ctx: DistributedContext, config: TrainConfig, checkpoint: Checkpoint | None) -> None:
        if ctx.eval_ranks and config.image_weights:
            raise UserError("--image-weights chooses images by the scores of the epoch before; leave out --eval-ranks")
        self._ctx, self._evaluators = ctx, None
        self._pending = pending_epoch(checkpoint) if checkpoint else None

    def start(self, trainer: Training) -> Action:
        self._validation = trainer.hooks.get(Validation)
        if self._ctx.eval_ranks:
            self._evaluators = Evaluators(self._ctx, self._validation.evaluator, self._setup(trainer))
        return self._settle(trainer)

    def after_last_step(self, trainer: Training, epoch: Epoch) -> Action | None:
        action = self._settle(trainer)
        is_due = self._validation.is_due(epoch.number, trainer.epochs)
        may_end = epoch.number == trainer.epochs
        may_end |= has_stalled(trainer.progress, trainer.run.config.patience, epoch=epoch.number)
        if action is None and is_due and not may_end and self._evaluators and self._evaluators.is_free():
            epoch.is_pending, epoch.row = True, {"time": trainer.seconds(), **epoch.row}
            progress = replace(trainer.progress, epoch=epoch.number)
            progress.begin_epoch()
            ema = copied(trainer.step.ema.module.state_dict()) if self._ctx.is_main else {}
            self._pending = _Pending(epoch, trainer.is_closing, progress, ema)
            self._evaluators.send(epoch.number, ema, closing=trainer.is_closing)
        return action

    def after_training(self, trainer: Training) -> Action | None:
        if self._pending is None:
            return None
        action = self._settle(trainer)  # a callback has ended the run
        trainer.save()
        return action

    def state_dict(self) -> dict[str, Any]:
        pending = self._pending
        if pending is None:
            return {}
        stored = {"row": pending.epoch.row, "is_closing": pending.is_closing}
        return stored | {"progress": asdict(pending.progress), "ema": pending.ema}

    def close(self) -> None:
        if self._evaluators is not None:
            self._evaluators.close()

    def _settle(self, trainer: Training) -> Action | None:
        """Counts the result of the pending epoch. If there is none, the training processes validate it; a signal that
        ends this leaves it pending."""
        pending = self._pending
        if pending is None:
            return None
        epoch, criterion = pending.epoch, trainer.step.criterion
        if self._evaluators is not None:
            epoch.result = self._evaluators.collect(trainer.control.stops_validation)
        if not broadcast_object(self._ctx, epoch.result is not None):
            model = copy.deepcopy(trainer.step.ema.module)
            model.load_state_dict(broadcast_object(self._ctx, pending.ema))
            criterion.set_closing(pending.is_closing)
            action = self._validation.run(trainer, model, epoch)
            criterion.set_closing(trainer.is_closing)
            if action is Action.STOP:
                return action
        self._pending, epoch.is_pending = None, False
        trainer.call("after_validation", epoch)
        if self._ctx.is_main:
            self._save_scored(trainer, pending)
        trainer.call("after_validation_saved", epoch)
        return None

    def _save_scored(self, trainer: Training, pending: _Pending) -> None:
        """Writes best.pt, and epochN.pt once more, if they are due after the pending epoch."""
        checkpointer, number = trainer.checkpointer, pending.epoch.number
        scored = {name: getattr(trainer.progress, name) for name in OF_RESULTS}
        result = {"progress": asdict(pending.progress) | scored, "metrics": pending.epoch.metrics}
        if pending.epoch.is_best:
            content = weights_part({**vars(checkpointer.description), "ema": pending.ema, **result})
            checkpointer.submit({checkpointer.best: content})
        if checkpointer.period and number % checkpointer.period == 0:
            checkpointer.finish()  # so that the file is there
            periodic = checkpointer.periodic(number)
            checkpointer.submit({periodic: {**read_checkpoint(periodic), "hooks": {}, **result}})

    def _setup(self, trainer: Training) -> dict[str, Any]:
        """What the evaluating processes know of the run."""
        run, description = trainer.run, trainer.checkpointer.description
        weights = trainer.step.criterion.class_weights
        return {name: getattr(description, name) for name in ("model_spec", "names", "val_images")} | {
            "ema": copied(trainer.step.ema.module.state_dict()),
            "config": run.config,
            "hyp": run.hyp,
            "data_root": run.data_root,
            "stored_in": str(run.checkpoint.path) if run.checkpoint and run.data_root else "",
            "class_weights": None if weights is None else weights.cpu(),
            "device": self._ctx.device.type,
            "threads": torch.get_num_threads(),
            "facts": common_facts(self._validation.loader.index),
        }


def pending_epoch(checkpoint: Checkpoint) -> _Pending | None:
    """The epoch of a checkpoint that has not been validated yet. Raises UserError for a state that no run writes."""
    stored = checkpoint.hooks.get(RemoteValidation.__name__)
    if stored is None:
        return None
    stored = check(stored, _StoredEpoch, f"{checkpoint.path}: damaged checkpoint: hooks")
    epoch = Epoch(stored["progress"].epoch, stored["row"], is_pending=True)
    return _Pending(epoch, stored["is_closing"], stored["progress"], stored["ema"])


def common_facts(index: DatasetIndex) -> dict[str, str]:
    """What must be equal in both groups."""
    facts = {"the code": product_version(), "torch": torch.__version__} | data_facts("val", index)
    return {name: str(value) for name, value in facts.items()}
