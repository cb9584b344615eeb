"""The training loop on a GPU: batches arrive as the loader has rendered them, and the host waits for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from benchmarks.speed.training_step import context_of
from data.loading.build import build_train_loader, open_train_samples
from data.loading.prefetcher import Prefetcher
from data.read_spec import load_dataset_spec
from engine.train.step import TrainStep
from tests.gpu.machine import Figure, Machine
from tests.gpu.step_checks import HostWaits
from tests.helpers.scripts import call
from utils.batches import Batch
from utils.config.recipes import hyperparameters_from
from utils.config.settings import TrainConfig

pytestmark = [pytest.mark.gpu, pytest.mark.quick]
BATCHES = 40
PRODUCTS = 4  # large matrix products before each copy, which give workers time to overwrite memory that is not kept
WATCHED_STEPS = range(3, 7)  # the first steps create states and constants


def test_batches_arrive_as_rendered(machine: Machine, data: Path, figure: Figure):
    on_gpu = machine.device != "cpu"
    ctx = context_of(machine.device)
    config = TrainConfig(imgsz=machine.imgsz, batch_size=machine.batch_size, epochs=1000, workers=4)
    hyp = hyperparameters_from("")
    samples = open_train_samples(ctx, config, hyp, load_dataset_spec(data), stride=32)
    loader = build_train_loader(ctx, config, hyp, samples, stride=32)
    side = 4096 if on_gpu else 16
    matrix = torch.rand(side, side, device=ctx.device)
    pinned = 0

    def delayed() -> Iterator[Batch]:
        nonlocal pinned
        for batch in loader:
            pinned += batch.images.is_pinned()
            with torch.cuda.stream(prefetcher._stream):  # which copies the batch
                for _ in range(PRODUCTS):
                    torch.mm(matrix, matrix)
            yield batch

    prefetcher = Prefetcher(delayed(), device=ctx.device)
    for number in range(BATCHES):
        images = next(prefetcher).images.cpu()
        prefetcher.prefetch(2)
        assert torch.equal(images, loader.render(*divmod(number, len(loader))).images), f"batch {number}"
    figure("batches in page-locked memory", pinned)
    assert pinned or not on_gpu


def test_the_host_waits_for_nothing_in_the_loop(
    machine: Machine, train_flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Loader, prefetcher, step and the rest of the loop: from the beginning of a step to that of another one."""
    waits = HostWaits(machine.device)
    numbers = itertools.count()
    watching = ExitStack()
    take_step = TrainStep.__call__

    def take_watched_step(self: TrainStep, *args: Any, **kwargs: Any) -> None:
        number = next(numbers)
        if number == WATCHED_STEPS.start:
            watching.enter_context(waits)
        if number == WATCHED_STEPS.stop:
            watching.close()
        take_step(self, *args, **kwargs)

    monkeypatch.setattr(TrainStep, "__call__", take_watched_step)
    with watching:
        call(train.main, *train_flags[1:], "--val-every", 0, "--project", tmp_path)
    assert next(numbers) > WATCHED_STEPS.stop, "the epoch is too short"
    assert not waits.places
