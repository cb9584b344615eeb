"""The training processes' side of the communication with the evaluating processes (``--eval-ranks``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from engine.eval_ranks.messages import (
    ENDED,
    FAILED,
    LEFT,
    POLL_S,
    READY,
    SCORES,
    SETUP,
    WAIT_ENDED,
    WEIGHTS,
    SetupMessage,
    WeightsMessage,
    discard_message,
    post_message,
    read_message,
)
from engine.evaluation.result import Evaluation
from utils.distributed.context import DistributedContext, broadcast_object
from utils.distributed.join import evaluation_store
from utils.logger import get_logger
from utils.strings import rank_list

# Longest wait of rank 0 for late scores: a fraction of the time since it sent the weights, within bounds.
LATE_FRACTION = 0.1
MIN_LATE_S = 5.0
MAX_LATE_S = 300.0
LEAVE_S = 2.0  # longest wait of rank 0 for the evaluating processes to end


def patience_s(since_sent_s: float) -> float:
    """Returns how many seconds rank 0 waits for scores, at the end of an epoch whose weights it sent ``since_sent_s``
    seconds before."""
    return min(max(LATE_FRACTION * since_sent_s, MIN_LATE_S), MAX_LATE_S)


class ValidationService:
    """Sends weights to the evaluating processes, and collects the scores. Every training process has one and makes the
    same calls. ``ctx``: with ``eval_ranks``, which only a run with a store has."""

    def __init__(self, ctx: DistributedContext, setup: SetupMessage) -> None:
        if ctx.store is None:
            raise ValueError("evaluating processes need the store of a distributed run")
        self._ctx = ctx
        self._run_store = ctx.store
        self._store = evaluation_store(ctx.store)
        self._number = 0  # number of the newest message with weights, from 1
        self._epoch = 0  # whose weights these are
        self._sent_at = 0.0
        self._is_busy = False
        self._wait_number = 0  # number of the newest wait for scores, from 1
        self._failure = ""  # why there will be no more scores
        self._ranks = range(ctx.world_size, ctx.world_size + ctx.eval_ranks)
        if ctx.is_main:
            post_message(self._store, SETUP, setup)
            get_logger().info("--eval-ranks: validation by %s while the others train", rank_list(self._ranks))

    def can_take_weights(self) -> bool:
        """Returns, on all ranks, whether the evaluating processes can take the weights of an epoch now."""
        can_take_weights = False
        if self._ctx.is_main:
            self._drop_late_scores()
            self._find_failure()
            are_ready = self._store.check([READY.format(rank=rank) for rank in range(self._ctx.eval_ranks)])
            can_take_weights = are_ready and not self._is_busy and not self._failure
        return broadcast_object(self._ctx, can_take_weights)

    def _drop_late_scores(self) -> None:
        """Discards scores that arrived too late, so that the evaluating processes count as free."""
        if self._is_busy and self._store.check([self._scores_key]):
            self._receive()

    def send(self, epoch: int, weights: WeightsMessage) -> None:
        """Sends the averaged weights of an epoch from rank 0, in the background."""
        if not self._ctx.is_main:
            return
        self._number += 1
        self._epoch = epoch
        self._is_busy = True
        self._sent_at = time.monotonic()
        key = self._weights_key

        def post() -> None:
            with suppress(dist.DistError):  # the run has ended meanwhile
                post_message(self._store, key, weights)

        threading.Thread(target=post, name="weights", daemon=True).start()

    def has_scores(self) -> bool:
        """Returns, on all ranks, whether the scores of the epoch that was sent last are there."""
        has_scores = self._ctx.is_main and self._is_busy and self._store.check([self._scores_key])
        return broadcast_object(self._ctx, has_scores)

    def collect(self, should_stop: Callable[[], bool]) -> Evaluation | None:
        """Waits on all ranks for the scores of the epoch that was sent last. Returns them on rank 0; None if they are
        late, and on other ranks.

        ``should_stop``: called while a rank waits, so that it can end the wait of rank 0.
        """
        self._wait_number += 1
        wait_ended_key = WAIT_ENDED.format(number=self._wait_number)
        if not self._ctx.is_main:
            while not self._store.check([wait_ended_key]):
                should_stop()
                time.sleep(POLL_S)
            return None
        has_scores = self._is_busy and self._wait_for_scores(should_stop)
        self._store.set(wait_ended_key, "")
        if not has_scores:
            return None
        return self._receive()

    def _wait_for_scores(self, should_stop: Callable[[], bool]) -> bool:
        """Waits until the scores are there. Returns False if they are late, or will not come."""
        now = time.monotonic()
        deadline = now + patience_s(now - self._sent_at)
        while not self._store.check([self._scores_key]):
            self._find_failure()
            if self._failure or should_stop():
                return False
            if time.monotonic() > deadline:
                get_logger().warning(
                    "--eval-ranks: no scores for epoch %d in time; the training processes validate it instead",
                    self._epoch,
                )
                return False
            time.sleep(POLL_S)
        return True

    @property
    def _weights_key(self) -> str:
        return WEIGHTS.format(number=self._number)

    @property
    def _scores_key(self) -> str:
        return SCORES.format(number=self._number)

    def _receive(self) -> Evaluation:
        """Removes the newest scores and their weights from the store. Returns the scores."""
        scores = read_message(self._store, self._scores_key)
        discard_message(self._store, self._scores_key)
        discard_message(self._store, self._weights_key)
        self._is_busy = False
        return scores

    def _find_failure(self) -> None:
        """Records and logs, once, that an evaluating process has failed."""
        if self._failure:
            return
        if self._store.check([FAILED]):
            self._failure = self._store.get(FAILED).decode()
        if self._failure:
            get_logger().warning("--eval-ranks: %s; the training processes validate from now on", self._failure)

    def close(self) -> None:
        """Ends the evaluating processes and waits for their end, because rank 0 may host the store that they read
        from."""
        if self._ctx.is_main:
            end_evaluating_processes(self._run_store, 0 if self._failure else self._ctx.eval_ranks)


def end_evaluating_processes(run_store: dist.Store, count: int) -> None:
    """Tells the evaluating processes to end, and waits up to `LEAVE_S` seconds until ``count`` of them have."""
    store = evaluation_store(run_store)
    deadline = time.monotonic() + LEAVE_S
    with suppress(dist.DistError):
        store.set(ENDED, "")
        while store.add(LEFT, 0) < count and time.monotonic() < deadline:
            time.sleep(POLL_S)
