"""Training images rendered on the device (here the CPU): equal batches for any workers, ranks, caches and restarts."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from data.cache.decoding import Decoding
from data.cache.device import open_device_cache
from data.image_io.decode import reduced_sizes
from data.index.index import DatasetIndex
from data.loading.build import build_train_loader, build_val_loader, check_loader_settings
from data.render.device import DeviceRenderer, PlannedBatch
from data.render.table import PyramidLayout
from tests.helpers.messages import refused
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic_index import write_dataset
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import get_logger
from utils.structures import Batch

SIZES = [(60 + 5 * (i % 7), 60 + 7 * (i % 5)) for i in range(22)]
HYP = Hyperparameters(mixup=0.3, degrees=3)
SINGLE = DistributedContext.single("cpu")


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> DatasetIndex:
    return write_dataset(tmp_path_factory.mktemp("images"), SIZES, objects=3)


@pytest.fixture
def loader_of(index, monkeypatch):
    """A loader for an existing index."""
    monkeypatch.setattr("data.loading.build.load_index", lambda *args, **kwargs: index)

    class Spec:
        source, tile = "synthetic.yaml", 0

    def build(*, ctx=SINGLE, start=None, training=True, hyp=HYP, **options):
        defaults = {"imgsz": 64, "batch_size": 8, "epochs": 20, "workers": 0, "render_on": "device"}
        config = TrainConfig(**(defaults | options))
        if not training:
            return build_val_loader(ctx, config, Spec(), stride=32)
        check_loader_settings(ctx, config, hyp)
        loader = build_train_loader(ctx, config, hyp, Spec(), stride=32)
        if start:
            loader.start_at(*start)
        return loader

    return build


@pytest.fixture
def batches_of(loader_of):
    """Batches, rendered."""

    def build(**options):
        loader = loader_of(**options)
        renderer = getattr(loader, "renderer", None)
        return loader if renderer is None else map(renderer, loader)

    return build


def assert_same(a: Batch, b: Batch, *, but: tuple[str, ...] = ()) -> None:
    for name in {"images", "indices", "original_hw", "letterbox"} - set(but):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.targets.rows, b.targets.rows)
    assert (a.paths, a.targets.counts) == (b.paths, b.targets.counts)


OPTIONS = [
    {},
    {"quad": True, "batch_size": 16, "multi_scale": 0.5},
    {"image_weights": True, "cache": "device"},
    {"rect": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_batches_equal_those_of_the_host_up_to_rounding(batches_of, options):
    """The images, labels and layout are equal; pixels differ only by interpolation and at the edges of tiles."""
    host = dict(options, cache="none", render_on="host")
    for ours, theirs in zip(islice(batches_of(**options), 5), batches_of(**host)):
        assert_same(ours, theirs, but=("images",))
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
            assert_same(a, b)
    for a, b in zip(whole[2:], batches_of(start=divmod(2, -(-22 // options.get("batch_size", 8))), **options)):
        assert_same(a, b)
    ranks = [batches_of(ctx=replace(SINGLE, rank=rank, world_size=4), **options) for rank in range(4)]
    for batch, *parts in zip(whole, *ranks):
        assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
        assert torch.equal(batch.targets.rows[:, 1:], torch.cat([part.targets.rows[:, 1:] for part in parts]))


def test_with_a_device_cache_workers_send_no_pixels(loader_of):
    """A hundred numbers per tile and a few hundred bytes per image for its labels and name, but no pixels."""
    planned = next(iter(loader_of(cache="device")))
    assert isinstance(planned, PlannedBatch)
    assert planned.groups[0].pixels is None
    tensors = [getattr(planned.groups[0].table, name) for name in ("geometry", "address", "mixed", "mix")]
    tensors += planned.groups[0].table.parameters
    assert sum(t.nbytes for t in tensors) < 8 * 2 * 4 * 100
    assert planned.rest.images.numel() == 0


def test_training_images_are_rendered_on_the_training_device(loader_of, batches_of):
    assert_same(loader_of(cache="device").render(1, 2), next(batches_of(start=(1, 2))))


@pytest.mark.parametrize(
    "options",
    [
        {"hyp": Hyperparameters(albumentations=[{"name": "Blur"}])},
        {"render_on": "host", "cache": "device"},
    ],
)
def test_settings_that_exclude_each_other_are_one_line(batches_of, options):
    with refused():
        batches_of(**options)


def test_a_data_set_that_does_not_fit_into_memory_is_one_line(batches_of, monkeypatch):
    monkeypatch.setattr("data.cache.device.available_memory", lambda: 1000)
    with refused():
        batches_of(cache="device")


def test_validation_images_are_still_rendered_on_the_host(batches_of, index):
    host = list(batches_of(training=False, render_on="host"))
    for ours, theirs in zip(batches_of(training=False, cache="device"), host):
        assert_same(ours, theirs)


def _caches_on_a_rank(ctx, *indices: DatasetIndex) -> list[np.ndarray | str]:
    caches: list[np.ndarray | str] = []
    for index in indices:
        layout = PyramidLayout.of(reduced_sizes(index.image_hw, 64))
        try:
            caches.append(open_device_cache(index, layout, ctx, Decoding()).numpy())
        except UserError as error:
            caches.append(str(error))
    return caches


def test_each_rank_decodes_a_part_and_receives_all_images(index, tmp_path):
    """An image that cannot be decoded ends all ranks."""
    damaged = write_dataset(tmp_path, SIZES[:6])
    Path(damaged.path(5)).write_bytes(b"\x89PNG")
    (alone,) = _caches_on_a_rank(SINGLE, index)
    first, second = run_ranks(2, _caches_on_a_rank, index, damaged)
    for cache in (first[0], second[0]):
        assert np.array_equal(cache, alone)
    assert "another process" in first[1]
    assert "005.png" in second[1]


def test_each_node_decodes_its_own_images(index):
    (alone,) = _caches_on_a_rank(SINGLE, index)
    for (cache,) in run_ranks(4, _caches_on_a_rank, index, local_world=2):
        assert np.array_equal(cache, alone)


def test_without_a_compiler_images_are_rendered_uncompiled(batches_of, monkeypatch):
    def broken(*_, **__):
        def fail(*_):
            raise RuntimeError("no compiler\nand a long story")

        return fail

    expected = list(islice(batches_of(), 2))
    monkeypatch.setattr(torch, "compile", broken)
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "info", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(
        "data.loading.on_device.DeviceRenderer", lambda device, cache, fuse: DeviceRenderer(device, fuse=True)
    )
    for a, b in zip(expected, batches_of()):
        assert_same(a, b)
    assert said == ["--render-on device: not compiled (no compiler); rendering is a few times slower"]
