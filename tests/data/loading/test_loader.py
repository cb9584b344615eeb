"""Loaders: batches that do not depend on workers or ranks, and a stream that can start anywhere."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from data.loading.collate import collate_quad
from tests.data.loading.small_loader import SINGLE
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_batch
from utils.batches import Batch, BatchRequest, Sample, SampleKey
from utils.errors import UserError


def rank_of(rank, world):
    return replace(SINGLE, rank=rank, world_size=world)


def sample_of(size, labels, value=0):
    labels = np.float32(labels).reshape(-1, 5)
    return Sample(np.full((*size, 3), value, np.uint8), labels, value, str(value), (9, 9), (1.0, 1.0), (0, 0))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_does_not_change_the_batches(open_loader, workers):
    for training, count in ((True, 7), (False, 3)):
        alone = list(islice(open_loader(training=training), count))
        shared = list(islice(open_loader(training=training, workers=workers), count))
        assert len(alone) == len(shared) == count
        for a, b in zip(alone, shared):
            assert_same_batch(a, b)


def test_workers_that_are_spawned_render_the_same_batches(open_loader, monkeypatch):
    """As on Windows and macOS."""
    monkeypatch.setattr("data.loading.workers.CONTEXT", multiprocessing.get_context("spawn"))
    for a, b in zip(open_loader(training=False, workers=1), open_loader(training=False), strict=True):
        assert_same_batch(a, b)


def test_batches_arrive_without_shared_memory(open_loader, monkeypatch):
    def refuse(count: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("data.loading.workers._shared_bytes", refuse)
    for a, b in zip(islice(open_loader(workers=2), 7), open_loader()):
        assert_same_batch(a, b)


def test_batches_for_a_gpu_are_pinned_by_a_thread(open_loader, monkeypatch):
    used = []
    pinned_by = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(Batch, "pin_memory", lambda self: pinned_by.append(threading.current_thread()) or self)
    loader = open_loader(training=False, workers=2, ctx=replace(SINGLE, device=torch.device("cuda")))
    for _ in range(2):
        for a, b in zip(loader, open_loader(training=False), strict=True):
            assert_same_batch(a, b)
    (thread,) = set(pinned_by)
    assert thread is not threading.main_thread()
    assert used == [3]


@pytest.mark.parametrize("options", [{}, {"quad": True}, {"multi_scale": 0.5}, {"rect": True}])
def test_memory_is_reused_only_after_its_batch_is_released(open_loader, options):
    """Worker and parent reuse a few slots; batches that are still referenced do not change, however many there are."""
    alone = list(islice(open_loader(**options), 24))
    loader = open_loader(workers=2, **options)
    for _ in range(2):  # another iteration; the first one was abandoned with batches in transit
        kept = []
        places = set()
        for number, batch in enumerate(islice(loader, 24)):
            places.add(batch.images.data_ptr())
            if number >= 12:
                kept.append(batch.images[..., 1:])
            else:
                assert_same_batch(alone[number], batch)
        for view, expected in zip(kept, alone[12:]):
            assert torch.equal(view, expected.images[..., 1:])
        assert len(places) < 20
        del batch, view, kept


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", [{}, {"quad": True, "batch_size": 16}, {"image_weights": True}, {"rect": True}])
def test_ranks_together_render_the_global_batch(open_loader, world, options):
    whole = islice(open_loader(**options), 5)
    shares = zip(*(islice(open_loader(ctx=rank_of(r, world), **options), 5) for r in range(world)))
    for batch, parts in zip(whole, shares):
        assert torch.equal(batch.images, torch.cat([p.images for p in parts]))
        assert torch.equal(batch.indices, torch.cat([p.indices for p in parts]))
        assert torch.equal(batch.targets.rows[:, 1:], torch.cat([p.targets.rows[:, 1:] for p in parts]))


def test_empty_shards_have_a_canvas_but_no_images(open_loader):
    loaders = [open_loader(ctx=rank_of(r, 8), workers=r % 2) for r in range(8)]
    last = [next(islice(loader, 2, 3)) for loader in loaders]  # 22 images: 6 for 8 ranks
    assert sorted(len(b.images) for b in last) == [0, 0] + [1] * 6
    for batch in last:
        assert batch.images.shape[1:] == (3, 64, 64)
        assert batch.targets.rows.shape[1] == 6
        assert batch.letterbox.shape == (len(batch.images), 4)
        assert batch.targets.max_targets >= 16


@pytest.mark.parametrize("workers", [0, 2])
def test_the_training_loader_is_endless_reshuffles_and_keeps_its_workers(open_loader, workers):
    loader = open_loader(workers=workers)
    assert len(loader) == 3
    stream = iter(loader)
    epochs = [[next(stream).indices.tolist() for _ in range(3)] for _ in range(4)]
    flat = [[i for batch in epoch for i in batch] for epoch in epochs]
    assert all(sorted(f) == list(range(22)) for f in flat)
    assert len({tuple(f) for f in flat}) == 4


@pytest.mark.parametrize("options", [{}, {"image_weights": True}, {"rect": True, "workers": 1}, {"multi_scale": 0.5}])
def test_resume_inside_an_epoch_equals_the_uninterrupted_stream(open_loader, options):
    whole = list(islice(open_loader(**options), 9))
    resumed = open_loader(**options)
    resumed.start_at(1, 2)
    for a, b in zip(whole[5:], resumed):
        assert_same_batch(a, b)
    resumed.start_at(1, 3)  # the end of an epoch is the start of the next
    assert_same_batch(next(iter(resumed)), whole[6])


@pytest.mark.parametrize("workers", [0, 2])
def test_class_weights_apply_from_the_next_epoch(open_loader, index, workers):
    loader = open_loader(image_weights=True, workers=workers)
    start = loader.class_weights
    stream = iter(loader)
    first = [next(stream) for _ in range(3)]
    loader.set_class_weights(np.array([0.0, 0.0, 1.0]))
    second = [next(stream) for _ in range(3)]
    has_labels = np.diff(index.offsets) > 0
    for i in torch.cat([b.indices for b in second]).tolist():
        assert not has_labels[i] or 2 in index.labels(i)[:, 0]
    again = open_loader(image_weights=True)
    np.testing.assert_array_equal(again.class_weights, start)
    for a, b in zip(first, again):
        assert_same_batch(a, b)


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}])
def test_another_number_of_epochs_applies_from_the_next_epoch(open_loader, options):
    """Workers apply it, too: the last epochs have neither mosaic nor mixup."""
    loader = open_loader(time=1.0, **options)
    shorter = open_loader(**options | {"epochs": 2, "workers": 0})
    usual = list(islice(open_loader(**options), 6))
    stream = iter(loader)
    first = [next(stream) for _ in range(3)]
    loader.set_epochs(2)
    second = [next(stream) for _ in range(3)]
    shorter.start_at(1)
    for batches, expected in ((first, usual), (second, islice(shorter, 3))):
        for a, b in zip(batches, expected):
            assert torch.equal(a.targets.rows, b.targets.rows)
    assert any(not torch.equal(a.targets.rows, b.targets.rows) for a, b in zip(second, usual[3:]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_validation_sees_each_image_once_and_can_be_repeated(open_loader, world, workers):
    loaders = [open_loader(training=False, ctx=rank_of(r, world), workers=workers) for r in range(world)]
    for _ in range(2):
        seen = [i for loader in loaders for batch in loader for i in batch.indices.tolist()]
        assert sorted(seen) == list(range(22))
    assert sum(len(loader) for loader in loaders) == len(open_loader(training=False))  # no batch is split
    if workers == 0:
        batches = {b.indices[0].item(): b for b in open_loader(training=False)}
        for loader in loaders:
            for batch in loader:
                assert_same_batch(batch, batches[batch.indices[0].item()])


def test_workers_of_a_loader_in_a_reference_cycle_end_with_it(open_loader):
    """In a notebook, the trainer and the hooks of a training refer to each other."""
    loader = open_loader(workers=2)
    loader.start()
    loader.owner = loader
    assert len(multiprocessing.active_children()) == 2
    del loader
    gc.collect()
    assert not multiprocessing.active_children()


def test_a_killed_worker_ends_the_iteration_and_the_next_one_has_new_workers(open_loader):
    loader = open_loader(workers=2)
    stream = iter(loader)
    next(stream)
    killed = multiprocessing.active_children()[0]
    killed.kill()
    with pytest.raises(UserError, match=r"^a loader process was killed by SIGKILL; .*--workers"):
        list(islice(stream, 9))
    assert not multiprocessing.active_children()
    assert_same_batch(next(iter(loader)), next(iter(open_loader())))


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (UserError("a.jpg: cannot be decoded"), UserError, "^a.jpg: cannot be decoded$"),
        (MemoryError(), UserError, "^not enough memory on this machine; less is needed .*$"),
        (KeyError("bug"), RuntimeError, "in a loader process(.|\n)*, in render(.|\n)*KeyError: 'bug'"),
    ],
)
def test_errors_in_workers_are_raised(open_loader, monkeypatch, error, kind, line):
    def render(*_: object) -> None:
        raise error

    loader = open_loader(workers=1)
    monkeypatch.setattr(loader.samples, "render", render)
    with pytest.raises(kind, match=line):
        next(iter(loader))


def test_quad_puts_four_samples_into_one_image():
    box = [[1, 0.5, 0.5, 1, 0.5]]
    small = (4, 6)
    samples = [sample_of(small, [] if v == 2 else box, v) for v in (1, 2, 3, 4)] + [sample_of((8, 12), box, 5)]
    keys = tuple(SampleKey(s.index, 0, s.index, s.image.shape[:2]) for s in samples)
    request = BatchRequest(keys, (8, 12), samples_per_image=(4, 1))
    assert request.images == [range(4), range(4, 5)]
    batch = collate_quad(samples, request, np.empty((2, 8, 12, 3), np.uint8))
    assert batch.images.shape == (2, 3, 8, 12)
    assert batch.images[0, 0, [0, 0, 7, 7], [0, 11, 0, 11]].tolist() == [1, 2, 3, 4]
    assert (batch.images[1] == 5).all()
    tiled = [[0, 1, 0.25, 0.25, 0.5, 0.25], [0, 1, 0.25, 0.75, 0.5, 0.25], [0, 1, 0.75, 0.75, 0.5, 0.25]]
    np.testing.assert_allclose(batch.targets.rows, [*tiled, [1, 1, 0.5, 0.5, 1, 0.5]])
    assert (batch.indices.tolist(), batch.paths, batch.targets.counts) == ([1, 5], ("1", "5"), (3, 1))


_INTERRUPTED = """
import multiprocessing, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from data.samples.dataset import AugmentedImages
from data.samples.readers import ImageReader
from data.loading.loader import InfiniteDataLoader
from data.loading.sampler import EpochOrder, DistributedSampler, TrainCanvases
from tests.data.loading.small_loader import HYP, SIZES
from tests.helpers.synthetic_index import write_rectangles
if __name__ == "__main__":
    index = write_rectangles(Path(sys.argv[2]), SIZES)
    dataset = AugmentedImages(ImageReader(index, imgsz=64), hyp=HYP)
    order = EpochOrder(dataset.weights, seed=0, batch_size=8, canvases=TrainCanvases(64, 32))
    sampler = DistributedSampler(order, rank=0, world_size=1, run_epochs=20)
    loader = InfiniteDataLoader(dataset, sampler, workers=2)
    try:
        for i, batch in enumerate(loader):
            if i == 3:
                print(*(w.pid for w in multiprocessing.active_children()), flush=True)
            time.sleep(0.01)
    except KeyboardInterrupt:
        raise SystemExit(7)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_no_worker_and_no_traceback(tmp_path, how):
    script = tmp_path / "interrupted.py"
    script.write_text(_INTERRUPTED)
    process = subprocess.Popen(
        [python(), str(script), str(ROOT), str(tmp_path / "images")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does, including the workers
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (7, "")
    else:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 60
    while any(_is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


def test_workers_ignore_sigterm_until_the_parent_ends_them(open_loader):
    gc.collect()  # what earlier tests have left
    stream = iter(open_loader(workers=2))
    first = list(islice(stream, 2))  # one of each worker: both have begun
    workers = [w.pid for w in multiprocessing.active_children()]
    assert len(workers) == 2
    subprocess.run(["kill", "-TERM", *map(str, workers)], check=True)
    first += islice(stream, 8)
    for a, b in zip(first, open_loader()):
        assert_same_batch(a, b)
    del stream
    assert not any(map(_is_alive, workers))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
