"""The torch renderer compared with the OpenCV renderer, and with itself in other batches and from other memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.augment.plan import Layer, Patch, SamplePlan
from data.render.device import render_table
from data.render.opencv import render_plan
from data.render.pyramid import MAX_LEVEL, PackedPixels, PyramidLayout, level_image, levels_for
from data.render.table import build_table
from tests.data.render.plans import SIZES, allocate, draw, packed
from tests.helpers.kernel_count import NoSync
from tests.helpers.synthetic_index import GEOMETRIES, draw_plan, smooth_image
from utils.batches import SampleKey
from utils.config.settings import Hyperparameters
from utils.pixels import GRAY


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [smooth_image(rng, height, width) for height, width in SIZES.tolist()]


def rendered(plans: list[SamplePlan], images: list[np.ndarray]) -> np.ndarray:
    return render_table(*packed(plans, images)).permute(0, 2, 3, 1).numpy()


def rendered_by_opencv(plans: list[SamplePlan], images: list[np.ndarray]) -> np.ndarray:
    return np.stack([render_plan(plan, images.__getitem__) for plan in plans])


@pytest.mark.parametrize("canvas", [(256, 256), (128, 192)])
@pytest.mark.parametrize("mosaic", [0.0, 1.0])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_torch_renderer_equals_the_opencv_renderer(images, geometry, mosaic, canvas):
    """Including flips, color, mixing and strong shrinking. With rotation, the two render the last pixel of a patch by
    different rules; otherwise every pixel agrees."""
    plans = draw(Hyperparameters(mosaic=mosaic, mixup=0.5, **GEOMETRIES[geometry]), 12, canvas)
    assert any(len(plan.layers) == 2 for plan in plans)
    ours = rendered(plans, images).astype(np.float32)
    difference = np.abs(ours - rendered_by_opencv(plans, images)).max(3)
    assert np.median(difference) <= 1
    assert (difference > 4).mean() < (0.001 if geometry in ("plain", "zoom", "flips") else 0.02)
    assert difference.mean() < 1.2


def test_fine_detail_equals_the_opencv_renderer():
    """Noise of single pixels, shrunk to no less than half: the bilinear weights are equal."""
    rng = np.random.default_rng(1)
    images = [rng.integers(0, 256, (int(h), int(w), 3), dtype=np.uint8) for h, w in SIZES]
    plans = draw(Hyperparameters(scale=0.3), 12, (256, 256))
    shrunk = [levels_for(np.stack([t.matrix]), np.array([t.region])) for p in plans for t in p.layers[0].patches]
    assert max(shrunk) == 0
    difference = np.abs(rendered(plans, images).astype(np.float32) - rendered_by_opencv(plans, images)).max(3)
    assert np.quantile(difference, 0.999) <= 2


def test_pixels_stay_the_same_without_augmentation():
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    whole = Patch(0, (0, 0, 96, 64), np.eye(3))
    drawn = rendered([SamplePlan((64, 96), (Layer((whole,)),), 1.0)], [image])
    assert np.array_equal(drawn[0], image)


def test_an_image_without_patches_is_gray_and_a_batch_without_images_is_empty(images):
    blank = SamplePlan((64, 32), (Layer(()),), 1.0)
    drawn = rendered([blank], images)
    assert drawn.shape == (1, 64, 32, 3)
    assert (drawn == GRAY).all()
    table = build_table([], (64, 32), SIZES, PackedPixels(images.__getitem__, allocate))
    assert render_table(table, torch.zeros((1, 3), dtype=torch.uint8)).shape == (0, 3, 64, 32)


@pytest.mark.parametrize("geometry", ["zoom", "rotate", "perspective"])
def test_an_image_does_not_depend_on_its_batch_or_on_the_memory_of_its_pixels(images, geometry):
    hyp = Hyperparameters(mosaic=0.7, mixup=0.4, **GEOMETRIES[geometry])
    plans = draw(hyp, 10, (128, 128))
    whole = rendered(plans, images)
    for first, last in ((0, 1), (1, 4), (4, 10)):
        assert np.array_equal(rendered(plans[first:last], images), whole[first:last])
    layout = PyramidLayout.of(SIZES)
    pool = torch.from_numpy(np.concatenate([layout.flat(image) for image in images]))
    assert len(pool) == layout.pixels
    cached = render_table(build_table(plans, (128, 128), SIZES, layout), pool)
    assert np.array_equal(cached.permute(0, 2, 3, 1).numpy(), whole)


@pytest.mark.parametrize("render", [rendered, rendered_by_opencv])
@pytest.mark.parametrize("degrees", [0.0, 25.0])
def test_adjacent_patches_leave_no_seam(render, degrees):
    images = [np.full((256, 256, 3), 200, np.uint8)] * 5
    hyp = Hyperparameters(degrees=degrees, mosaic=1, hsv_h=0, hsv_s=0, hsv_v=0, scale=0, translate=0)
    plans = [
        draw_plan(SampleKey(0, 0, p, (256, 256)), source_hw=np.array([[256, 256]] * 5), hyp=hyp, seed=5, epochs=50)
        for p in range(20)
    ]
    assert (render(plans, images)[:, 96:160, 96:160] == 200).all()  # within all patches, for any center of the mosaic


def test_strong_shrink_is_antialiased():
    stripes = np.zeros((640, 640, 3), np.uint8)
    stripes[:, ::2] = 255
    for gain in (0.5, 0.2, 0.06):
        side = round(640 * gain) // 32 * 32 or 32
        patch = Patch(0, (0, 0, 640, 640), np.diag([gain, gain, 1.0]))
        drawn = rendered([SamplePlan((side, side), (Layer((patch,)),), 1.0)], [stripes])
        assert np.abs(drawn[0].astype(int) - 127).max() <= 2


def test_mipmap_levels_halve_down_to_the_allowed_size():
    gains = np.array([1.5, 1.0, 0.51, 0.5, 0.26, 0.25, 0.03, 0.001])
    matrices = np.stack([np.diag([g, g, 1.0]) for g in gains])
    regions = np.tile([0, 0, 100, 100], (len(gains), 1))
    assert levels_for(matrices, regions).tolist() == [0, 0, 0, 1, 1, 2, 5, MAX_LEVEL]
    assert level_image(np.zeros((5, 3, 3), np.uint8), 2).shape == (1, 1, 3)


def test_regions_of_a_smaller_level_stay_inside_it(images):
    """Narrow regions at the far edges of images that shrink strongly: rounding must not read a neighbor's pixels."""
    plans = []
    for size in (3, 5, 31, 90):
        for gain in (0.4, 0.11, 0.03):
            region = (size - 2, size - 1, size, size)
            move = np.array([[gain, 0, -gain * (size - 2) + 8], [0, gain, -gain * (size - 1) + 8], [0, 0, 1.0]])
            turned = move @ np.array([[1, 1e-4, 0], [0, 1, 0], [0, 0, 1.0]])
            plans.append((size, SamplePlan((32, 32), (Layer((Patch(0, region, turned),)),), 1.0)))
    for size, plan in plans:
        lone = [np.full((size, size, 3), 9, np.uint8)]
        assert set(np.unique(rendered([plan], lone))) <= {9, GRAY}


def test_no_operation_waits_for_the_device(images):
    plans = draw(Hyperparameters(mixup=0.5, degrees=5, perspective=0.0005), 4, (64, 64))
    table, pixels = packed(plans, images)
    with NoSync():
        render_table(table, pixels)
