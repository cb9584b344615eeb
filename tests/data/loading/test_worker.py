"""Memory that workers render batches into: who owns it, and when it can be reused."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
from collections import Counter
from dataclasses import replace
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from data.loading.worker import BatchSlots, SentBatch
from utils.batches import Batch, Targets

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
SHAPE = (2, 4, 6, 3)


def batch_in(slots: BatchSlots, slot: int, value: int) -> Batch:
    """A batch in a slot, as a worker makes it."""
    pixels = torch.from_numpy(slots.pixels(slot, SHAPE)).fill_(value)
    numbers = {"original_hw": torch.ones(2, 2, dtype=torch.int32), "letterbox": torch.zeros(2, 4, dtype=torch.float64)}
    targets = Targets(torch.rand(3, 6), (1, 2))
    indices = torch.tensor([4, 5])
    return Batch(pixels.permute(0, 3, 1, 2), targets, indices, **numbers, paths=("a", "b"))


def sent(batch: Batch, slots: BatchSlots, slot: int) -> Batch:
    return pickle.loads(ForkingPickler.dumps(SentBatch(batch, slots, slot)))


def shared_files() -> Counter[str]:
    """Returns the shared memory that this process has open as files: "memfd:NAME", or a path in /dev/shm.

    Earlier tests may have left other files, or garbage that owns such memory.
    """
    gc.collect()
    names: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            target = os.readlink(descriptor).removeprefix("/")
            if target.startswith(("memfd:", "dev/shm/")):
                names[target.removesuffix(" (deleted)")] += 1
    return names


def test_the_batch_arrives_and_its_slot_is_freed_with_its_last_tensor():
    slots = BatchSlots(2, 1000)
    slot = slots.take(2 * 4 * 6 * 3)
    arrived = sent(batch_in(slots, slot, 7), slots, slot)
    assert arrived.images.shape == (2, 3, 4, 6)
    assert arrived.images.is_contiguous(memory_format=torch.channels_last)
    assert (arrived.images == 7).all()
    assert (arrived.paths, arrived.targets.counts) == (("a", "b"), (1, 2))
    assert slots.take(144) is not None
    assert slots.take(144) is None
    view = replace(arrived, indices=arrived.indices * 2).shard(1, 2).images[..., 1:]
    del arrived
    gc.collect()
    assert slots.take(144) is None
    del view
    assert slots.take(144) == slot


def _fill(slots: BatchSlots, results) -> None:
    results.send_bytes(ForkingPickler.dumps(SentBatch(batch_in(slots, 1, 9), slots, 1)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_write_to_the_same_memory(method):
    context = multiprocessing.get_context(method)
    slots = BatchSlots(2, 1000)
    here, there = context.Pipe()
    worker = context.Process(target=_fill, args=(slots, there))
    worker.start()
    arrived = pickle.loads(here.recv_bytes())
    worker.join()
    assert (arrived.images == 9).all()
    assert (slots.pixels(1, SHAPE) == 9).all()
    assert (slots.pixels(0, SHAPE) == 0).all()


def test_a_large_tensor_is_sent_with_its_strides_in_anonymous_memory():
    before = shared_files()
    rows = torch.rand(10_000, 6)[1:]
    images = torch.randint(0, 256, (2, 3, 200, 200), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    message = Batch(images, Targets(rows, (9_999,)), *[torch.ones(1)] * 3)
    sent_bytes = ForkingPickler.dumps(SentBatch(message))
    assert not message.images.is_shared()
    assert len(sent_bytes) < 5000
    again = pickle.loads(sent_bytes)
    for arrived, tensor in ((again.images, images), (again.targets.rows, rows)):
        assert torch.equal(arrived, tensor)
        assert arrived.stride() == tensor.stride()
    resource_sharer.stop(timeout=30)  # its thread may still have the files open that it has sent
    assert shared_files() - before == {"memfd:lockstep-tensor": 2}
    del again, arrived
    assert shared_files() == before
