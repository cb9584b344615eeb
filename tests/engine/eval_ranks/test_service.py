"""Messages between training and evaluating processes, in one process."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from engine.eval_ranks import service
from engine.eval_ranks.messages import SCORES, WEIGHTS, WeightsMessage, discard_message, post_message, read_message
from engine.eval_ranks.service import patience_s
from engine.parallel import control
from tests.helpers.same_content import assert_same_content
from utils.distributed.context import DistributedContext
from utils.distributed.join import evaluation_store
from utils.errors import REQUEUE
from utils.process.signals import StopSignals


def test_waiting_for_late_scores_ends_before_the_others_time_out():
    assert [patience_s(sent) for sent in (0.0, 50.0, 600.0, 36_000.0)] == [5.0, 5.0, 60.0, 300.0]


@pytest.mark.parametrize("signaled", [0, 1])
def test_a_signal_to_any_rank_ends_the_wait_for_scores(monkeypatch, signaled):
    monkeypatch.setattr(service, "MIN_LATE_S", 1000.0)
    monkeypatch.setattr(control, "POLL_EVERY_S", 0.0)
    store = dist.HashStore()
    single = DistributedContext.single("cpu")
    signals = [StopSignals(), StopSignals()]
    returned: list[int] = []

    def wait(rank: int) -> None:
        ctx = replace(single, rank=rank, world_size=2, eval_ranks=1, store=store)
        evaluating = service.ValidationService(ctx, None)
        evaluating.send(1, WeightsMessage({}, is_closing=False))
        assert evaluating.collect(control.RunControl(ctx, signals[rank]).should_stop) is None
        returned.append(rank)

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert not returned
    signals[signaled].code = REQUEUE
    for thread in threads:
        thread.join(60)
    assert sorted(returned) == [0, 1]


def test_messages_of_any_size_arrive_and_leave_the_store_empty():
    store = dist.HashStore()
    message = {"a": torch.arange(3_000_000), "b": [1, "x", None, (2.5, True)]}
    assert read_message(store, "m") is None
    post_message(store, "m", message)
    assert store.num_keys() > 2
    for _ in range(2):
        assert_same_content(read_message(store, "m"), message)
    discard_message(store, "m")
    assert store.num_keys() == 0
    assert read_message(store, "m") is None


def test_the_weights_and_the_scores_of_an_epoch_are_removed_from_the_store():
    """Otherwise it would grow by a model in each epoch."""
    store = dist.HashStore()
    ctx = replace(DistributedContext.single("cpu"), eval_ranks=1, store=store)
    training = service.ValidationService(ctx, None)
    messages = evaluation_store(store)
    counts = []
    for epoch in (1, 2):
        training.send(epoch, WeightsMessage({"weight": torch.ones(3)}, is_closing=False))
        while read_message(messages, WEIGHTS.format(number=epoch)) is None:
            time.sleep(0.001)
        post_message(messages, SCORES.format(number=epoch), {"AP": epoch / 10})
        assert training.collect(lambda: False) == {"AP": epoch / 10}
        counts.append(store.num_keys())
    assert counts[1] == counts[0] + 1  # the end of the wait
