"""The settings of a run's loaders: workers, batches, canvases, and what processes must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from data.loading.build import data_facts, loader_workers
from data.loading.prefetcher import Prefetcher
from tests.data.loading.small_loader import SINGLE
from tests.helpers.tiny import make_batch
from utils.batches import Batch, map_tensors
from utils.config.settings import TrainConfig, ValConfig


@pytest.mark.parametrize(("device", "cores", "processes", "expected"), [
    ("cpu", 2, 1, 2), ("cpu", 2, 4, 1), ("cpu", 16, 1, 8), ("cpu", 7, 2, 3), ("mps", 8, 1, 8),
    ("cuda", 16, 1, 14), ("cuda", 16, 4, 3), ("cuda", 1, 2, 1), ("cuda", 128, 1, 16), ("cuda", 128, 8, 15),
])  # fmt: skip
def test_the_default_number_of_workers_is_an_equal_part_of_the_cores(monkeypatch, device, cores, processes, expected):
    monkeypatch.setattr("data.loading.build.available_cores", lambda: cores)
    ctx = replace(SINGLE, local_world_size=processes, device=torch.device(device))
    assert loader_workers(-1, ctx) == expected
    assert loader_workers(5, ctx) == 5


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("config", [TrainConfig, ValConfig])
def test_images_of_a_validation_are_padded_to_squares_if_the_head_wants_them(open_loader, squares, config):
    loader = open_loader(training=False, imgsz=160, squares=squares, config=config)
    assert all(batch.images.shape[2] == batch.images.shape[3] for batch in loader) == squares


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("classes", lambda classes: classes[::-1]),
        ("incomplete", lambda incomplete: ~incomplete),  # tiles without objects of these images never occur
        ("names", lambda names: (*names, "other")),
        ("image_hw", lambda image_hw: image_hw + 1),
    ],
)
def test_copies_of_a_data_set_that_lead_to_other_epochs_have_other_facts(index, field, change):
    changed = replace(index, **{field: change(getattr(index, field))})
    facts, other = data_facts("train", index), data_facts("train", changed)
    assert facts == data_facts("train", replace(index))
    assert len({name for name in facts if facts[name] != other[name]}) == 1


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
