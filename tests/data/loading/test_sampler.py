"""Ranks divide the images: the same global batches on any number of ranks, and a new order in each epoch."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from data.loading.sampler import DistributedSampler, EpochOrder, TrainCanvases, rect_shapes
from data.render.letterbox import CanvasRule
from data.samples.dataset import LoadImagesAndLabels
from data.samples.readers import ImageReader
from data.samples.weights import image_weights, inverse_frequency_weights
from utils.labels import LabelArrays

IMAGE_HW = np.random.default_rng(0).integers(100, 600, (53, 2))


@dataclass(frozen=True)
class SimpleLabels(LabelArrays):
    offsets: np.ndarray
    classes: np.ndarray
    crowd: np.ndarray


def order_of(count=53, batch_size=16, *, imgsz=320, rect=False, seed=4, block=0):
    hw = IMAGE_HW[:count] if rect else None
    weights = np.ones(count)
    return EpochOrder(weights, seed=seed, batch_size=batch_size, canvases=TrainCanvases(imgsz, 32, hw), block=block)


def sampler_of(rank=0, world=1, **options):
    more = {name: options.pop(name) for name in ("quad", "multi_scale") if name in options}
    return DistributedSampler(order_of(**options), rank=rank, world_size=world, run_epochs=20, **more)


@pytest.mark.parametrize(
    "options", [{}, {"rect": True}, {"quad": True}, {"multi_scale": 0.5}, {"count": 3}, {"block": 8}]
)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_shards_of_all_ranks_form_the_same_global_batches(world, options):
    for epoch in (0, 3):
        whole = list(sampler_of(**options).requests(epoch))
        shares = [list(sampler_of(rank, world, **options).requests(epoch)) for rank in range(world)]
        assert {len(s) for s in shares} == {len(whole)}
        for request, *parts in zip(whole, *shares):
            assert sum((part.keys for part in parts), ()) == request.keys
            assert sum(len(part.images) for part in parts) == len(request.images)
            assert {part.canvas_hw for part in parts} == {request.canvas_hw}


@pytest.mark.parametrize("options", [{}, {"rect": True}, {"quad": True}, {"rect": True, "multi_scale": 0.5}])
def test_no_canvas_is_smaller_or_larger_than_the_extreme_ones(options):
    sampler = sampler_of(**options)
    keys = [key for epoch in range(20) for request in sampler.requests(epoch) for key in request.keys]
    sizes = np.array([key.canvas_hw for key in keys])
    extremes = np.array([*sampler.extreme_canvases()])
    assert (extremes.min(0) <= sizes.min(0)).all()
    assert (sizes.max(0) <= extremes.max(0)).all()


def test_global_batch_is_a_slice_of_the_permutation():
    sampler = sampler_of()
    order = order_of()
    orders = [tuple(order.indices(e)) for e in range(5)]
    assert len({*orders, tuple(order_of(seed=5).indices(1))}) == 6
    permutation = order.indices(2)
    assert sorted(permutation) == list(range(53))
    for k, request in enumerate(sampler.requests(2)):
        assert [key.position for key in request.keys] == list(range(16 * k, min(16 * k + 16, 53)))
        assert [key.index for key in request.keys] == permutation[16 * k : 16 * k + 16].tolist()
        assert sampler.global_images(k) == len(request.keys)


@pytest.mark.parametrize("quad", [False, True])
@pytest.mark.parametrize(("count", "block"), [(53, 8), (53, 16), (48, 16), (5, 8), (1, 16)])
def test_blocks_are_aligned_slices_of_the_permutation(count, block, quad):
    """Every key has the images of the aligned block that contains its position; the last block contains the remaining
    ones."""
    order = order_of(count, block=block)
    indices = order.indices(2).tolist()
    starts = list(range(0, max(count // block, 1) * block, block))
    blocks = [tuple(indices[a:b]) for a, b in zip(starts, [*starts[1:], count])]
    assert sum(blocks, ()) == tuple(indices)
    for request in DistributedSampler(order, rank=0, world_size=1, run_epochs=20, quad=quad).requests(2):
        for key in request.keys:
            assert key.block == blocks[min(key.position // block, len(blocks) - 1)]
            assert key.index in key.block


def test_endless_requests_start_at_any_step():
    stream = sampler_of()
    assert len(stream) == 4
    whole = list(islice(stream, 12))
    assert [r.keys[0].epoch for r in whole] == [0] * 4 + [1] * 4 + [2] * 4
    stream.set_epoch(1, first_batch=2)
    assert list(islice(stream, 6)) == whole[6:]
    stream.stops_after_epoch = True
    assert [*stream, *stream] == whole[6:12]


@pytest.mark.parametrize("count", [7, 53])
def test_rect_batches_group_similar_aspects_in_a_constant_number_of_batches(count):
    sampler = sampler_of(count=count, rect=True, batch_size=8)
    epochs = [list(sampler.requests(e)) for e in range(4)]
    assert {len(e) for e in epochs} == {len(sampler)}
    for requests in epochs:
        assert sorted(k.index for r in requests for k in r.keys) == list(range(count))
        for request in requests:
            members = IMAGE_HW[[k.index for k in request.keys]]
            fitted = members * (320 / members.max(1, keepdims=True))
            canvas = np.array(request.canvas_hw)
            assert (fitted <= canvas + 1e-6).all()
            assert (canvas % 32 == 0).all()
            assert (canvas - fitted.max(0) < 32).all()
    if count == 53:
        assert len({tuple(r.canvas_hw for r in e) for e in epochs}) > 1
        area = np.mean([np.prod(r.canvas_hw) for e in epochs for r in e])
        assert area < 0.8 * 320 * 320


def test_weighted_draws_follow_the_weights_on_any_number_of_ranks():
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 4, 2000)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    classes = rng.choice(3, offsets[-1], p=[0.9, 0.08, 0.02])
    labels = SimpleLabels(offsets, classes, np.zeros(len(classes), bool))
    weights = image_weights(inverse_frequency_weights(np.bincount(classes)), labels)
    per_image = np.stack([np.bincount(classes[a:b], minlength=3) for a, b in pairwise(offsets)])
    expected = weights @ per_image / (weights @ per_image).sum()

    def drawn(world):
        shares = []
        for rank in range(world):
            sampler = sampler_of(rank, world, count=2000, batch_size=64)
            sampler.order.draw_weights = weights
            shares.append([[k.index for k in r.keys] for e in range(5) for r in sampler.requests(e)])
        return [functools.reduce(operator.iadd, batch, []) for batch in zip(*shares)]

    assert drawn(4) == drawn(1)
    sampled = per_image[functools.reduce(operator.iadd, drawn(1), [])].sum(0)
    np.testing.assert_allclose(sampled / sampled.sum(), expected, atol=0.015)
    uniform = per_image.sum(0) / per_image.sum()
    assert sampled[2] / sampled.sum() > 5 * uniform[2]


def test_quad_groups_four_consecutive_samples():
    sampler = sampler_of(count=54, quad=True)
    assert [sampler.global_images(k) for k in range(len(sampler))] == [4, 4, 4, 1]
    images = [[r.keys[i] for i in members] for e in range(20) for r in sampler.requests(e) for members in r.images]
    tiled = [p for p in images if len(p) == 4]
    single = [p for p in images if len(p) == 1]
    assert len(tiled) + len(single) == len(images) == 20 * 13
    assert 0.35 < len(tiled) / len(images) < 0.65
    assert {k.canvas_hw for p in tiled for k in p} == {(320, 320)}
    assert {k.canvas_hw for p in single for k in p} == {(640, 640)}
    assert {p[0].position % 4 for p in single} == {0, 1, 2, 3}
    assert len(sampler_of(count=50, quad=True)) == 3  # two samples are left over


def test_multi_scale_draws_one_size_per_batch_within_range():
    requests = [r for e in range(30) for r in sampler_of(multi_scale=0.5).requests(e)]
    sides = {r.canvas_hw for r in requests}
    assert all(h == w and h % 32 == 0 and 160 <= h <= 480 for h, w in sides)
    assert len(sides) >= 9
    requests = [r for e in range(30) for r in sampler_of(imgsz=64, multi_scale=0.9).requests(e)]
    assert min(min(r.canvas_hw) for r in requests) == 64  # two strides: batch norm needs more than one value


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("rule", [{}, {"is_square": True}, {"fixed_hw": (192, 320)}])
def test_a_validation_has_each_image_once_and_the_canvas_of_an_image_is_its_own(rule, world):
    canvases = CanvasRule(320, 32, **rule)
    samples = LoadImagesAndLabels(ImageReader(SimpleNamespace(image_hw=IMAGE_HW), imgsz=320))
    requests = [r for rank in range(world) for r in samples.requests(8, canvases, rank=rank, world_size=world)]
    assert sorted(k.index for r in requests for k in r.keys) == list(range(53))
    for request in requests:
        assert 1 <= len(request.keys) <= 8
        for key in request.keys:
            assert key.canvas_hw == request.canvas_hw == canvases.canvas_hw(IMAGE_HW[key.index].tolist())
    one_by_one = samples.requests(1, canvases)
    assert {(k.index, k.canvas_hw) for r in one_by_one for k in r.keys} == {
        (k.index, k.canvas_hw) for r in requests for k in r.keys
    }
    nothing = SimpleNamespace(image_hw=np.zeros((0, 2), int))
    assert LoadImagesAndLabels(ImageReader(nothing, imgsz=320)).requests(8, canvases) == []


def test_rect_shapes_follow_the_convention():
    def shape(low, high):
        return rect_shapes(np.array([low]), np.array([high]), 640, 32)[0].tolist()

    assert shape(0.75, 0.75) == [480, 640]
    assert shape(0.5, 0.75) == [480, 640]
    assert shape(4 / 3, 2.0) == [640, 480]
    assert shape(0.75, 4 / 3) == [640, 640]
    aspect = np.array([40 / 23])  # 1280 * 23 / 40 is 736, but a little more in floating point
    assert rect_shapes(aspect, aspect, 1280, 32).tolist() == [[1280, 736]]
