"""Plans depend only on their keys and follow the hyper-parameters; labels are mapped by the matrices of patches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from data.augment.labels import transform_labels
from data.augment.mosaic import PartnerPool
from tests.helpers.synthetic_index import draw_plan, draw_plans
from utils.batches import SampleKey
from utils.config.settings import Hyperparameters

SOURCE_HW = np.array([[480, 640], [640, 480], [333, 500], [64, 48], [640, 640], [100, 640]])
BUSY = {"degrees": 10.0, "shear": 3.0, "perspective": 0.0005, "mixup": 0.5, "flipud": 0.5}
OPTIONS = {"source_hw": SOURCE_HW, "seed": 7, "epochs": 100}


def key_at(position: int, *, epoch: int = 0, canvas: tuple[int, int] = (320, 320)) -> SampleKey:
    return SampleKey(position % len(SOURCE_HW), epoch, position, canvas)


def plan_of(hyp: Hyperparameters, position: int = 0, *, epoch: int = 0, canvas=(320, 320), **more):
    return draw_plan(key_at(position, epoch=epoch, canvas=canvas), hyp=hyp, **(OPTIONS | more))


def flat(plan) -> list:
    return [plan.canvas_hw, plan.mix] + [
        (patch.index, patch.region, patch.matrix.tolist(), [values.tolist() for _, values in layer.operations])
        for layer in plan.layers
        for patch in layer.patches
    ]


@pytest.mark.parametrize("hyp", [Hyperparameters(), Hyperparameters(**BUSY, mosaic=0.6)])
def test_a_plan_depends_on_its_key_alone(hyp):
    """Neither on its batch, which differs between ranks, nor on global generators; bit by bit."""
    keys = [SampleKey(p % 6, 3, p, (320, 256), (4, 2, 0, 5)[: p % 5]) for p in (*range(17), 40, 41, 7)]
    together = [flat(plan) for plan in draw_plans(keys, hyp=hyp, **OPTIONS)]
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    assert together[::-1] == [flat(draw_plan(key, hyp=hyp, **OPTIONS)) for key in reversed(keys)]
    assert together[5:] == [flat(plan) for plan in draw_plans(keys[5:], hyp=hyp, **OPTIONS)]
    assert len({repr(plan) for plan in together}) == len({key.position for key in keys})
    for changed in ({"seed": 8}, {"seed": 7, "key": keys[0]._replace(epoch=4)}):
        key = changed.pop("key", keys[0])
        assert flat(draw_plan(key, hyp=hyp, **(OPTIONS | changed))) != together[0]
    assert draw_plans([], hyp=hyp, **OPTIONS) == []


def test_frequencies_are_the_probabilities():
    hyp = Hyperparameters(mosaic=0.3, mixup=0.6, scale=0, translate=0, fliplr=0.25)
    plans = [plan_of(hyp, p) for p in range(1000)]
    mosaics = np.mean([len(p.layers[0].patches) > 1 for p in plans])
    mixed = np.mean([len(p.layers) == 2 for p in plans])
    mirrored = np.mean([p.layers[0].patches[0].matrix[0, 0] < 0 for p in plans])
    assert (mosaics, mixed, mirrored) == pytest.approx((0.3, 0.6, 0.25), abs=0.04)
    shares = [p.mix for p in plans if len(p.layers) == 2]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
    assert np.std(shares) == pytest.approx(np.sqrt(1 / (4 * 65)), rel=0.15)  # standard deviation of Beta(32, 32)


@pytest.mark.parametrize(
    ("weights", "block"), [(np.ones(6), ()), (np.array([0, 1, 0.5, 0, 1, 0]), ()), (np.ones(6), (1, 2, 3, 4, 5))]
)
def test_partners_come_from_the_block_or_as_often_as_in_an_epoch(weights, block):
    """Tiles whose labels are incomplete have weight 0. Partners in a block are distinct and never the image itself."""
    options = OPTIONS | {"pool": PartnerPool(weights)}
    keys = [SampleKey(1, 0, position, (320, 320), block) for position in range(1000)]
    mixed = draw_plans(keys, hyp=Hyperparameters(mosaic=0.0, mixup=1.0, scale=0, translate=0), **options)
    partners = [plan.layers[1].patches[0].index for plan in mixed]
    fractions = np.bincount(partners, minlength=6) / len(partners)
    expected = np.isin(np.arange(6), (2, 3, 4, 5)) if block else weights
    assert (fractions[expected == 0] == 0).all()
    np.testing.assert_allclose(fractions, expected / expected.sum(), atol=0.05)
    if block:
        mosaics = draw_plans(keys, hyp=Hyperparameters(mosaic=1.0, scale=0, translate=0), **options)
        images_of_mosaics = [[patch.index for patch in plan.layers[0].patches] for plan in mosaics]
        assert all(len(set(images)) == len(images) and set(images) <= set(block) for images in images_of_mosaics)


def test_the_last_epochs_have_no_mosaic_and_no_mixup():
    """Nor has a single image. Short runs close in their second half."""
    hyp = Hyperparameters(mosaic=1, mixup=1, scale=0, translate=0)
    for epochs, closing in ((100, 10), (20, 10), (6, 3), (5, 2), (1, 0)):
        for epoch in range(epochs):
            plan = plan_of(hyp, epoch=epoch, epochs=epochs)
            is_plain = len(plan.layers) == 1 and len(plan.layers[0].patches) == 1
            assert is_plain == (epoch >= epochs - closing)
    assert len(plan_of(hyp, single_image=True).layers) == len(plan_of(hyp, single_image=True).layers[0].patches) == 1


@pytest.mark.parametrize(("close", "expected"), [(4, [0.5, 0.4, 0.3, 0.2, 0.1]), (0, [0.5] * 5)])
def test_scale_jitter_shrinks_over_the_last_epochs(close, expected):
    hyp = Hyperparameters(mosaic=0, close_scale=close)
    keys = [key_at(p, epoch=epoch) for epoch in (5, 6, 7, 8, 9) for p in range(200)]
    plans = draw_plans(keys, hyp=hyp, **(OPTIONS | {"epochs": 10}))
    matrices = np.array([plan.layers[0].patches[0].matrix for plan in plans])
    scales = np.abs(matrices[:, 0, 0]) * [SOURCE_HW[key.index].max() / 320 for key in keys]
    ranges = np.abs(scales.reshape(5, 200) - 1).max(1)
    assert ranges == pytest.approx(expected, abs=0.02)  # edges are moved to whole pixels
    assert len({m[0, 2] for m in matrices[-200:]}) > 100  # translation stays


@pytest.mark.parametrize("hyp", [{"perspective": 0.01, "degrees": 20, "shear": 5}, {"scale": 1.0, "mosaic": 0.0}])
def test_no_strength_folds_or_flattens_the_image(hyp):
    for position in range(200):
        for patch in plan_of(Hyperparameters(**hyp), position, canvas=(640, 640)).layers[0].patches:
            height, width = SOURCE_HW[patch.index]
            corners = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], float)
            assert (corners @ patch.matrix[2] > 0).all()
            assert abs(np.linalg.det(patch.matrix)) > 0


DOUBLE = np.diag([2.0, 2.0, 1.0])
TURNED = np.array([[0.0, -1.0, 100.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # a quarter turn of 100 x 100 pixels


@pytest.mark.parametrize(
    ("label", "width", "matrix", "expected"),
    [
        ([1, 0.5, 0.5, 0.5, 0.5], 100, DOUBLE, [1, 50, 50, 100, 100]),
        ([1, 0.2, 0.5, 0.2, 0.4], 100, TURNED, [1, 30, 10, 70, 30]),
        ([1, 0.5, 0.5, 0.0099, 0.5], 100, DOUBLE, None),  # below 2 pixels
        ([1, 0.5, 0.5, 1.0, 1.0], 9, np.eye(3), None),  # a tenth of the area must be visible
        ([1, 0.5, 0.5, 1.0, 1.0], 11, np.eye(3), [1, 0, 0, 11, 100]),
        ([-1, 0.5, 0.5, 0.001, 0.5], 100, np.eye(3), [-1, 49.95, 25, 50.05, 75]),  # of a region, any piece
    ],
)
def test_labels_are_hulls_clipped_to_region_and_canvas_and_dropped_if_little_is_left(label, width, matrix, expected):
    """``width``: of the region of the image that is seen."""
    patch = {"source_hw": [(100, 100)], "regions": [(0, 0, width, 100)], "matrices": [matrix]}
    rows, _ = transform_labels(np.array([label]), np.zeros(1, int), **patch, canvas_hw=(100, 100))
    np.testing.assert_allclose(rows, np.zeros((0, 5)) if expected is None else [expected], atol=1e-9)
