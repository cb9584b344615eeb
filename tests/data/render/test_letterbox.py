"""The canvas of an image, and its place on the canvas."""

from __future__ import annotations

import numpy as np
import pytest

from data.render.letterbox import CanvasRule, fit_letterbox


@pytest.mark.parametrize(
    ("image_hw", "options", "canvas_hw"),
    [
        ((480, 640), {}, (512, 672)),
        ((720, 1280), {}, (384, 672)),  # 360 + 16 px
        ((1, 5000), {}, (32, 672)),
        ((375, 500), {}, (512, 672)),  # smaller images are enlarged
        ((480, 640), {"is_square": True}, (640, 640)),
    ],
)
def test_a_rectangle_leaves_half_a_stride_around_the_image(image_hw, options, canvas_hw):
    assert CanvasRule(640, 32, **options).canvas_hw(image_hw) == canvas_hw


@pytest.mark.parametrize(("imgsz", "stride"), [(64, 8), (320, 32), (640, 32), (640, 64)])
def test_canvases_are_the_smallest_that_hold_image_and_padding(imgsz, stride):
    for height, width in np.random.default_rng(0).integers(1, 3000, (200, 2)).tolist():
        canvas = CanvasRule(imgsz, stride).canvas_hw((height, width))
        fit = fit_letterbox((height, width), canvas, imgsz)
        assert max(fit.width, fit.height) == imgsz
        for side, total, pad, used in zip((height, width), canvas, (fit.pad_y, fit.pad_x), (fit.height, fit.width)):
            smallest = side * imgsz / max(height, width) + stride / 2
            assert total % stride == 0
            assert smallest - 1e-6 <= total < smallest + stride + 1e-6
            assert abs(total - used - 2 * pad) <= 1  # centered
