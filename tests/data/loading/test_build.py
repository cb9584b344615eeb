"""The settings of a run's loaders: workers, batches, canvases, and what processes must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from data.loading.build import data_facts
from data.loading.prefetcher import Prefetcher
from tests.helpers.tiny import make_batch
from utils.batches import Batch
from utils.config.settings import TrainConfig, ValConfig


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


def test_all_batches_for_a_gpu_are_copied_by_one_stream(monkeypatch):
    """The allocator keeps blocks for each."""
    created = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: created.append(device) or device)
    for _ in range(3):  # validations
        Prefetcher(iter(()), device=torch.device("cuda", 7))
    assert len(created) == 1


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
