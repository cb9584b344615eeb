"""Training images rendered on the device (here the CPU): equal batches for any workers, ranks, caches and restarts."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from data.cache.decoding import Decoding
from data.cache.device import open_device_cache
from data.images.reduce import reduced_sizes
from data.index.index import DatasetIndex
from data.render.device import DeviceRenderer, PlannedBatch
from data.render.pyramid import PyramidLayout
from tests.data.loading.small_loader import SINGLE, SIZES
from tests.helpers.messages import refused
from tests.helpers.ranks import run_ranks
from tests.helpers.same_content import assert_same_batch
from tests.helpers.synthetic_index import write_rectangles
from utils.config.settings import Hyperparameters
from utils.errors import PeerFailure, UserError
from utils.logger import get_logger


@pytest.fixture
def batches_of(open_loader):
    """Batches, rendered."""

    def build(**options):
        loader = open_loader(**OF_DEVICE | options)
        renderer = getattr(loader, "renderer", None)
        return loader if renderer is None else map(renderer, loader)

    return build


OF_DEVICE = {"hyp": Hyperparameters(mixup=0.3, degrees=3), "render_on": "device"}
OPTIONS = [
    *({}, {"rect": True}, {"image_weights": True, "cache": "device"}),
    {"quad": True, "batch_size": 16, "multi_scale": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_batches_equal_those_of_the_host_up_to_rounding(batches_of, options):
    """The images, labels and layout are equal; pixels differ only by interpolation and at the edges of tiles."""
    host = dict(options, cache="none", render_on="host")
    for ours, theirs in zip(islice(batches_of(**options), 5), batches_of(**host)):
        assert_same_batch(ours, theirs, but="images")
        assert ours.images.dtype == torch.uint8
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        difference = (ours.images.int() - theirs.images.int()).abs().amax(1)
        assert difference.median() <= 1
        assert (difference > 8).float().mean() < 0.06


@pytest.mark.parametrize("options", OPTIONS)
def test_workers_ranks_cache_and_restart_do_not_change_the_batches(batches_of, options):
    whole = list(islice(batches_of(**options), 5))
    for other in ({"workers": 2}, {"cache": "device"}, {"cache": "none"}):
        for a, b in zip(whole, batches_of(**(options | other))):
            assert_same_batch(a, b)
    for a, b in zip(whole[2:], batches_of(start=divmod(2, -(-22 // options.get("batch_size", 8))), **options)):
        assert_same_batch(a, b)
    ranks = [batches_of(ctx=replace(SINGLE, rank=rank, world_size=4), **options) for rank in range(4)]
    for batch, *parts in zip(whole, *ranks):
        assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
        assert torch.equal(batch.targets.rows[:, 1:], torch.cat([part.targets.rows[:, 1:] for part in parts]))


def test_with_a_device_cache_workers_send_no_pixels(open_loader, batches_of):
    """A hundred numbers per tile and a few hundred bytes per image for its labels and name, but no pixels."""
    loader = open_loader(**OF_DEVICE, cache="device")
    planned = next(iter(loader))
    assert isinstance(planned, PlannedBatch)
    assert planned.groups[0].pixels is None
    tensors = [getattr(planned.groups[0].table, name) for name in ("geometry", "address", "mixed", "mix")]
    tensors += planned.groups[0].table.parameters
    assert sum(t.nbytes for t in tensors) < 8 * 2 * 4 * 100
    assert planned.rest.images.numel() == 0
    assert_same_batch(loader.render(1, 2), next(batches_of(start=(1, 2))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hyp": Hyperparameters(albumentations=[{"name": "Blur"}])},
            "--render-on device: the hyper-parameter albumentations needs images on the host; empty it, or "
            "use --render-on host",
        ),
        (
            {"render_on": "host", "cache": "device"},
            "--cache device: images on the device can only be rendered there; add --render-on device",
        ),
        (
            {"cache": "device"},
            "--cache device: needs 313 kB in the memory of cpu, but may use only 70% of the ... free; use --cache ram",
        ),  # does not fit into the memory
    ],
)
def test_settings_that_exclude_each_other_are_one_line(batches_of, options, monkeypatch, message):
    monkeypatch.setattr("data.cache.device.available_memory", lambda: 1000)
    with refused(message):
        batches_of(**options)


def test_validation_images_are_still_rendered_on_the_host(batches_of, index):
    host = list(batches_of(training=False, render_on="host"))
    for ours, theirs in zip(batches_of(training=False, cache="device"), host):
        assert_same_batch(ours, theirs)


def _caches_on_a_rank(ctx, *indices: DatasetIndex) -> list[np.ndarray | BaseException]:
    """Returns the cache of each index, or the error that was raised. The third index is too large for the memory of
    rank 2."""
    caches: list[np.ndarray | BaseException] = []
    for number, index in enumerate(indices):
        layout = PyramidLayout.of(reduced_sizes(index.image_hw, 64))
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == number == 2:
                patch.setattr("data.cache.device.available_memory", _out_of_memory)
            try:
                caches.append(open_device_cache(ctx, index, layout, Decoding()).numpy())
            except (UserError, PeerFailure, MemoryError) as error:
                caches.append(error)
    return caches


def _out_of_memory() -> NoReturn:
    raise MemoryError("no memory")


def test_each_rank_decodes_a_part_and_receives_all_images(index, tmp_path):
    """Any failure of one process ends all of them, and only that process reports it."""
    damaged = write_rectangles(tmp_path, SIZES[:6])
    Path(damaged.path(5)).write_bytes(b"\x89PNG")
    (alone,) = _caches_on_a_rank(SINGLE, index)
    results = run_ranks(4, _caches_on_a_rank, index, damaged, index, local_world=2)
    for rank, (cache, undecodable, too_large) in enumerate(results):
        assert np.array_equal(cache, alone)
        assert type(undecodable) is (PeerFailure, UserError)[rank % 2]  # the last image is in the second shard
        assert "005.png" in str(undecodable)
        assert type(too_large) is (MemoryError if rank == 2 else PeerFailure)
        assert "no memory" in str(too_large)


def test_without_a_compiler_images_are_rendered_uncompiled(batches_of, monkeypatch):
    def broken(*_, **__):
        def fail(*_):
            raise RuntimeError("no compiler\nand a long story")

        return fail

    expected = list(islice(batches_of(), 2))
    monkeypatch.setattr(torch, "compile", broken)
    messages: list[str] = []
    monkeypatch.setattr(get_logger(), "info", lambda text, *values: messages.append(text % values))
    monkeypatch.setattr(
        "data.loading.build.DeviceRenderer", lambda device, cache, fuse: DeviceRenderer(device, fuse=True)
    )
    for a, b in zip(expected, batches_of()):
        assert_same_batch(a, b)
    assert messages == ["--render-on device: not compiled (no compiler); rendering is a few times slower"]
