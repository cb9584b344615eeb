"""``--eval-ranks``: the last processes of a job validate the averaged weights while the others train.

Both have process groups of their own, so the loss of an evaluating process (engine/tools/evaluating_process.py) cannot
break a collective of the training ones. They exchange messages in the run's store: rank 0 posts what the others need to
know of the run, then the weights of an epoch whenever they are free, and finds their scores there an epoch later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.index.index import DatasetIndex
from data.loading.build import data_facts
from engine.evaluation.evaluator import Evaluator
from utils.config.settings import TrainConfig
from utils.distributed.agreement import product_version
from utils.distributed.collectives import broadcast_object, discard_message, post_message, read_message
from utils.distributed.context import DistributedContext, evaluators
from utils.distributed.rendezvous import rank_list
from utils.distributed.store_barrier import has_died
from utils.errors import UserError
from utils.logger import get_logger
from utils.structures import Batch, Detections, DetectionTable, EvalResult

POLL_S = 0.05
# How long rank 0 waits for scores that are late: seconds, or a fraction of the time since it has sent the weights.
LATE_S, LATE_FRACTION = 5.0, 0.1
LEAVE_S = 2.0


class RemoteValidation:
    """The training processes' side. Each of them has one and makes the same calls.

    Args:
        evaluator: of this process; gets the detections and the preview, as if it had validated itself.
        setup: for the evaluating processes.
    """

    def __init__(self, ctx: DistributedContext, evaluator: Evaluator, setup: dict[str, Any]) -> None:
        self._ctx, self._evaluator, self._store = ctx, evaluator, evaluators(ctx.store)
        self._number = self._epoch = 0  # of the newest message with weights, from 1, and of its epoch
        self._sent_at, self._is_busy, self._was_late = 0.0, False, False
        self._failure = ""  # why there will be no more scores
        self._ranks = range(ctx.world_size, ctx.world_size + ctx.eval_ranks)
        if ctx.is_main:
            post_message(self._store, "setup", setup)
            get_logger().info("--eval-ranks: validation by %s while the others train", rank_list(self._ranks))

    def is_free(self) -> bool:
        """Whether the evaluating processes take the weights of an epoch now."""
        return broadcast_object(self._ctx, self._ctx.is_main and self._is_free())

    def _is_free(self) -> bool:
        if self._is_busy and self._store.check([f"scores/{self._number}"]):
            self._receive()  # too late
        self._find_failure()
        are_ready = self._store.check([f"ready/{rank}" for rank in range(self._ctx.eval_ranks)])
        return are_ready and not self._is_busy and not self._failure

    def send(self, epoch: int, weights: dict[str, Tensor] | None, *, refining: bool) -> None:
        """Sends the averaged weights of an epoch, on the CPU of rank 0, in the background. ``refining``: see
        `Criterion.set_refining`."""
        if not self._ctx.is_main:
            return
        self._number, self._epoch, self._is_busy, self._sent_at = self._number + 1, epoch, True, time.monotonic()
        message = {"ema": weights, "refining": refining}
        arguments = (self._store, f"weights/{self._number}", message)
        threading.Thread(target=_post_if_possible, args=arguments, name="weights", daemon=True).start()

    def collect(self, should_stop: Callable[[], bool]) -> EvalResult | None:
        """On rank 0, the scores of the epoch that was sent last, or None after a warning if there are none in time, or
        if there was none; None elsewhere."""
        if not self._is_busy:
            return None
        patience_s = max(LATE_S, LATE_FRACTION * (time.monotonic() - self._sent_at))
        deadline = time.monotonic() + patience_s
        while not self._store.check([f"scores/{self._number}"]):
            self._find_failure()
            if self._failure or should_stop():
                return None
            if time.monotonic() > deadline:
                if not self._was_late:
                    text = (
                        "--eval-ranks: no scores of epoch %d in time; the training processes validate when this happens"
                    )
                    get_logger().warning(text, self._epoch)
                self._was_late = True
                return None
            time.sleep(POLL_S)
        scores = self._receive()
        preview, found = scores["preview"], scores["detections"]
        self._evaluator.preview = preview and (Batch(**preview[0]), Detections(*preview[1]))
        self._evaluator.detections = found and DetectionTable(**_to_arrays(found))
        return EvalResult(**_to_arrays(scores["result"]))

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


def _post_if_possible(store: dist.Store, key: str, message: Any) -> None:
    with suppress(dist.DistError):  # the run has ended meanwhile
        post_message(store, key, message)


@contextmanager
def remote_validation(
    ctx: DistributedContext, evaluator: Evaluator, index: DatasetIndex, setup: Mapping[str, Any]
) -> Iterator[RemoteValidation | None]:
    """Yields the training processes' side, None without evaluating processes, which end with the block.

    Args:
        evaluator: of this process, for the validation split ``index``.
        setup: what the evaluating processes know of the run.
    """
    if not ctx.eval_ranks:
        yield None
        return
    local = {"device": ctx.device.type, "threads": torch.get_num_threads(), "facts": common_facts(index)}
    remote = RemoteValidation(ctx, evaluator, {**setup, **local})
    try:
        yield remote
    finally:
        remote.close()


def check_remote_validation(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that need the scores of an epoch before the next one begins."""
    if ctx.eval_ranks and config.image_weights:
        raise UserError("--image-weights chooses images by the scores of the epoch before; leave out --eval-ranks")


def common_facts(index: DatasetIndex) -> dict[str, str]:
    """What must be equal in both groups."""
    facts = {"the code": product_version(), "torch": torch.__version__} | data_facts("val", index)
    return {name: str(value) for name, value in facts.items()}


def _to_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
