"""Parameters depend only on the key, and follow the hyper-parameters."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from data.augment import plan as plan_module
from data.augment.augmentation import SharedColumns
from data.augment.mosaic import Mosaic, PartnerPool
from data.augment.projection import are_axis_aligned, project_points
from data.augment.transforms import ColorJitter, color_matrices
from tests.helpers.synthetic_index import draw_plan, draw_plans
from utils.batches import SampleKey
from utils.config.settings import Hyperparameters

SOURCE_HW = np.array([[480, 640], [640, 480], [333, 500], [64, 48], [640, 640], [100, 640]])
PLAIN = Hyperparameters(
    mosaic=0, degrees=0, translate=0, scale=0, shear=0, perspective=0, fliplr=0, flipud=0, hsv_h=0, hsv_s=0, hsv_v=0
)


def plan_of(hyp: Hyperparameters, position: int = 0, *, epoch: int = 0, epochs: int = 100, canvas=(320, 320), **more):
    key = SampleKey(position % len(SOURCE_HW), epoch, position, canvas)
    return draw_plan(key, source_hw=SOURCE_HW, hyp=hyp, seed=7, epochs=epochs, **more)


def flat(plan) -> list:
    return [plan.canvas_hw, plan.mix] + [
        (t.index, t.region, t.matrix.tolist(), [parameters.tolist() for _, parameters in p.operations])
        for p in plan.layers
        for t in p.patches
    ]


def test_a_plan_depends_on_the_key_and_not_on_global_generators():
    hyp = Hyperparameters(degrees=10, shear=3, perspective=0.0005, mixup=0.5, flipud=0.5)
    before = [flat(plan_of(hyp, p)) for p in range(20)]
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    torch.manual_seed(99)
    after = [flat(plan_of(hyp, p)) for p in reversed(range(20))][::-1]
    assert before == after
    assert len({repr(p) for p in before}) == 20


def test_partners_without_a_block_come_as_often_as_in_an_epoch():
    """Tiles whose labels are incomplete have weight 0 and are never drawn."""
    hyp = Hyperparameters(**{**vars(PLAIN), "mosaic": 1.0, "mixup": 1.0})
    weights = np.array([0, 1, 0.5, 0, 1, 0])
    keys = [SampleKey(1, 0, position, (320, 320)) for position in range(1000)]
    options = {"source_hw": SOURCE_HW, "hyp": hyp, "seed": 7, "epochs": 100}
    plans = draw_plans(keys, pool=PartnerPool(weights), **options)
    partners = [patch.index for plan in plans for patch in plan.layers[1].patches]
    fractions = np.bincount(partners, minlength=6) / len(partners)
    assert (fractions[weights == 0] == 0).all()
    np.testing.assert_allclose(fractions, weights / weights.sum(), atol=0.04)
    assert [flat(plan) for plan in draw_plans(keys[:9], pool=PartnerPool(np.ones(6)), **options)] == [
        flat(plan) for plan in draw_plans(keys[:9], **options)
    ]
    assert PartnerPool(weights).draw([0.0, np.nextafter(1, 0)]) == [1, 4]


def test_a_plan_does_not_depend_on_its_batch():
    """Plans must be bitwise equal, because other ranks draw other batches."""
    hyp = Hyperparameters(degrees=10, shear=3, perspective=0.0005, mixup=0.5, mosaic=0.6, flipud=0.5)
    keys = [SampleKey(p % len(SOURCE_HW), 3, p, (320, 256), (4, 2, 0, 5)[: p % 5]) for p in (*range(17), 40, 41, 7)]
    for settings in (hyp, Hyperparameters()):
        options = {"source_hw": SOURCE_HW, "hyp": settings, "seed": 7, "epochs": 100}
        together = [flat(plan) for plan in draw_plans(keys, **options)]
        assert together == [flat(draw_plan(key, **options)) for key in keys]
        assert together[5:] == [flat(plan) for plan in draw_plans(keys[5:], **options)]
    assert draw_plans([], **options) == []


def test_an_added_augmentation_does_not_change_the_draws_of_others(monkeypatch):
    """It has a separate random stream, and the second image of a mixed sample has separate numbers."""

    class Doubled(ColorJitter):
        name = "doubled"
        columns = None

    hyp = Hyperparameters(mixup=0.5, degrees=5)
    before = [plan_of(hyp, p) for p in range(12)]
    monkeypatch.setattr(plan_module, "PIXEL", (Doubled, *plan_module.PIXEL))
    drawn = set()
    for position, old in enumerate(before):
        new = plan_of(hyp, position)
        assert new.mix == old.mix
        for ours, theirs in zip(new.layers, old.layers, strict=True):
            assert [t.matrix.tolist() for t in ours.patches] == [t.matrix.tolist() for t in theirs.patches]
            assert np.array_equal(ours.operations[1][1], theirs.operations[0][1])
            drawn |= {o[1].tobytes() for o in (*ours.operations, *theirs.operations)}
    assert len(drawn) == 2 * sum(len(plan.layers) for plan in before)


def test_augmentations_share_no_numbers():
    kinds = (Mosaic, *plan_module.GEOMETRIC, *plan_module.PIXEL)
    assert len({kind.name for kind in kinds}) == len(kinds)
    ranges = {kind: range(kind.columns.start, kind.columns.stop) for kind in kinds if kind.columns}
    assert all(len(columns) == kind.num_uniforms for kind, columns in ranges.items())
    assert sorted(itertools.chain(*ranges.values())) == list(range(SharedColumns.SECOND_LAYER.start))


def test_epoch_position_and_seed_change_the_plan():
    hyp = Hyperparameters()
    key = SampleKey(0, 1, 2, (320, 320))
    one = flat(draw_plan(key, source_hw=SOURCE_HW, hyp=hyp, seed=0, epochs=100))
    for other, seed in ((key._replace(epoch=2), 0), (key._replace(position=3), 0), (key, 1)):
        assert one != flat(draw_plan(other, source_hw=SOURCE_HW, hyp=hyp, seed=seed, epochs=100))


def test_the_last_epochs_have_no_mosaic_and_no_mixup():
    """Nor does a single image."""
    hyp = Hyperparameters(mosaic=1, mixup=1, close_mosaic=3, scale=0, translate=0)
    for position in range(10):
        assert len(plan_of(hyp, position, epoch=6, epochs=10).layers) == 2
        late = plan_of(hyp, position, epoch=7, epochs=10)
        assert [len(p.patches) for p in late.layers] == [1]
        assert len(plan_of(hyp, position, single_image=True).layers[0].patches) == 1


def test_scale_jitter_shrinks_over_the_last_epochs():
    hyp = Hyperparameters(mosaic=0, close_scale=4)
    keys = [SampleKey(p % len(SOURCE_HW), epoch, p, (320, 320)) for epoch in (5, 6, 7, 8, 9) for p in range(200)]
    plans = draw_plans(keys, source_hw=SOURCE_HW, hyp=hyp, seed=7, epochs=10)
    matrices = np.array([plan.layers[0].patches[0].matrix for plan in plans])
    scales = np.abs(matrices[:, 0, 0]) * [SOURCE_HW[key.index].max() / 320 for key in keys]
    ranges = np.abs(scales.reshape(5, 200) - 1).max(1)
    assert ranges == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1], abs=0.02)  # edges are moved to whole pixels
    assert len({m[0, 2] for m in matrices[-200:]}) > 100  # translation stays
    alone = [draw_plans([key], source_hw=SOURCE_HW, hyp=hyp, seed=7, epochs=10)[0] for key in keys[::50]]
    assert [flat(plan) for plan in plans[::50]] == [flat(plan) for plan in alone]


def test_short_runs_close_in_their_second_half():
    hyp = Hyperparameters(mosaic=1, scale=0, translate=0)
    for epochs, closing in ((100, 10), (20, 10), (6, 3), (5, 2), (1, 0)):
        patches = [len(plan_of(hyp, 0, epoch=epoch, epochs=epochs).layers[0].patches) for epoch in range(epochs)]
        assert [n == 1 for n in patches] == [epoch >= epochs - closing for epoch in range(epochs)]


def test_zero_keeps_the_scale_jitter_to_the_end():
    hyp = Hyperparameters(mosaic=0, close_scale=0)
    last = [
        draw_plan(SampleKey(1, 9, p, (320, 320)), source_hw=SOURCE_HW, hyp=hyp, seed=7, epochs=epochs)
        for p in range(5)
        for epochs in (10, 100)
    ]
    assert [flat(plan) for plan in last[::2]] == [flat(plan) for plan in last[1::2]]


def test_frequencies_match_the_probabilities():
    hyp = Hyperparameters(mosaic=0.3, mixup=0.6, scale=0, translate=0, fliplr=0.25)
    plans = [plan_of(hyp, p) for p in range(1000)]
    mosaics = np.mean([len(p.layers[0].patches) > 1 for p in plans])
    mixed = np.mean([len(p.layers) == 2 for p in plans])
    mirrored = np.mean([p.layers[0].patches[0].matrix[0, 0] < 0 for p in plans])
    assert (mosaics, mixed, mirrored) == pytest.approx((0.3, 0.6, 0.25), abs=0.04)
    shares = [p.mix for p in plans if len(p.layers) == 2]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
    assert np.std(shares) == pytest.approx(np.sqrt(1 / (4 * 65)), rel=0.15)  # standard deviation of Beta(32, 32)


def test_partners_are_uniform_over_the_data_set():
    plans = [plan_of(Hyperparameters(scale=0, translate=0, degrees=1), p) for p in range(700)]
    partners = [t.index for p in plans for t in p.layers[0].patches[1:]]
    counts = np.bincount(partners, minlength=len(SOURCE_HW)) / len(partners)
    assert counts == pytest.approx(np.full(len(SOURCE_HW), 1 / len(SOURCE_HW)), abs=0.03)


def test_partners_come_uniformly_from_the_block():
    """Partners are distinct, never the image itself, and equally frequent; other draws do not change."""
    hyp = Hyperparameters(mixup=1.0)
    hw = np.full((100, 2), 320)
    counts = np.zeros(100, int)
    for position in range(400):
        key = SampleKey(7, 0, position, (320, 320), tuple(range(5, 13)))
        plan = draw_plan(key, source_hw=hw, hyp=hyp, seed=7, epochs=100)
        first, second = ([t.index for t in layer.patches] for layer in plan.layers)
        for members in (first, second):
            assert len(set(members)) == len(members)
            assert set(members) <= set(key.block)
        counts += np.bincount([i for i in first if i != 7], minlength=100)
    assert counts[5:13].sum() == counts.sum()
    assert counts[[5, 6, 8, 9, 10, 11, 12]].std() < 0.15 * counts[5:13].mean()
    alone = draw_plan(SampleKey(3, 0, 0, (320, 320), (3,)), source_hw=hw, hyp=hyp, seed=7, epochs=100)
    assert {t.index for t in alone.layers[0].patches} == {3}


@pytest.mark.parametrize("canvas", [(320, 320), (256, 384)])
def test_mosaic_patches_share_one_corner_and_do_not_overlap(canvas):
    hyp = Hyperparameters(scale=0.5, degrees=0)
    for position in range(50):
        patches = plan_of(hyp, position, canvas=canvas).layers[0].patches
        cover = np.zeros(canvas, int)
        for patch in patches:
            x1, y1, x2, y2 = patch.region
            corners = np.rint(project_points(patch.matrix, np.array([[x1, y1], [x2, y2]], float))).astype(int)
            low, high = corners.min(0).clip(0), corners.max(0).clip(0)
            cover[low[1] : high[1], low[0] : high[0]] += 1
        assert cover.max() <= 1


def test_unaugmented_image_fills_the_canvas_centered():
    (layer,) = plan_of(PLAIN, 0).layers
    assert layer.operations == ()
    corners = project_points(layer.patches[0].matrix, np.array([[0, 0], [640, 480]], float))
    np.testing.assert_allclose(corners, [[0, 40], [320, 280]])


def test_snapping_moves_edges_by_half_a_pixel_at_most():
    # The same draws with an invisible rotation keep the exact matrix.
    exact = Hyperparameters(degrees=1e-9)
    snapped = Hyperparameters()
    for position in range(100):
        pairs = zip(plan_of(snapped, position).layers[0].patches, plan_of(exact, position).layers[0].patches)
        for a, b in pairs:
            if a.index != b.index:  # one was outside the canvas by less than a pixel
                break
            assert are_axis_aligned(a.matrix[None]).all()
            x1, y1, x2, y2 = a.region
            points = np.array([[x1, y1], [x2, y2]], float)
            difference = np.abs(project_points(a.matrix, points) - project_points(b.matrix, points))
            assert difference.max() <= 0.5 + 1e-6


@pytest.mark.parametrize("perspective", [0.001, 0.01])
def test_perspective_never_folds_the_image(perspective):
    hyp = Hyperparameters(perspective=perspective, degrees=20, shear=5)
    for position in range(200):
        for patch in plan_of(hyp, position, canvas=(640, 640)).layers[0].patches:
            height, width = SOURCE_HW[patch.index]
            corners = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], float)
            assert (corners @ patch.matrix[2] > 0).all()


def test_full_scale_jitter_keeps_a_positive_scale():
    hyp = Hyperparameters(scale=1, degrees=0, mosaic=0)
    gains = [t.matrix[0, 0] for p in range(300) for t in plan_of(hyp, p).layers[0].patches]
    assert np.isfinite(gains).all()
    assert np.abs(gains).min() > 0


def test_color_matrices_equal_their_definition():
    def of(*jitter: float) -> np.ndarray:
        return color_matrices(np.array([jitter]))[0]

    np.testing.assert_allclose(of(0, 0, 0), np.eye(3), atol=1e-12)
    gray = np.array([80.0, 80.0, 80.0])
    np.testing.assert_allclose(of(0.3, 0.5, 0) @ gray, gray, atol=0.5)
    np.testing.assert_allclose(of(0, -1, 0) @ [200, 10, 60], np.full(3, 0.299 * 200 + 5.87 + 6.84), atol=0.5)
    np.testing.assert_allclose(of(0, 0, 0.4), 1.4 * np.eye(3), atol=1e-12)
    np.testing.assert_allclose(np.linalg.matrix_power(of(1 / 3, 0, 0), 3), np.eye(3), atol=1e-9)
