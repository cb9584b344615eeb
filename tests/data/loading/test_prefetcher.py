"""Prefetching: batches arrive in order, as many as requested, and never across a decision that depends on
validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from data.loading.prefetcher import Prefetcher
from tests.helpers.tiny import make_batch
from utils.batches import Batch, map_tensors

CPU = torch.device("cpu")


class Loader:
    """Yields ten batches and counts those that were fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    def __iter__(self) -> Iterator[Batch]:
        for number in range(10):
            self.fetched += 1
            yield replace(make_batch(1, seed=number), indices=torch.tensor([number]))


def test_batches_arrive_in_order_and_are_fetched_ahead():
    loader = Loader()
    prefetcher = Prefetcher(iter(loader), device=CPU)
    seen = []
    fetched = []
    for wanted in (1, 1, 2, 2, 1, 0, 0):
        seen.append(int(next(prefetcher).indices))
        prefetcher.prefetch(wanted)
        fetched.append(loader.fetched)
    assert seen == list(range(7))
    assert fetched == [2, 3, 5, 6, 6, 6, 7]
    assert [int(b.indices) for b in prefetcher] == [7, 8, 9]
    assert prefetcher.pop_wait_time() > 0 == prefetcher.pop_wait_time()


def test_errors_in_the_data_are_raised():
    prefetcher = Prefetcher((make_batch(1 // number) for number in (1, 0)), device=CPU)
    next(prefetcher)
    with pytest.raises(ZeroDivisionError):
        prefetcher.prefetch(1)


def test_the_allocator_knows_the_stream_that_uses_a_batch(monkeypatch):
    told = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append((tensor, stream)))
    batch = make_batch(2).to("meta")
    batch.record_stream("stream")
    moved = []
    map_tensors(batch, lambda tensor: tensor.device.type == "meta" and moved.append(tensor))
    assert {id(tensor) for tensor, _ in told} == set(map(id, moved))
