"""The canvas of an image."""

from __future__ import annotations

import math

import numpy as np
import pytest

from data.render.letterbox import CanvasRule, fit_letterbox


@pytest.mark.parametrize(
    ("image_hw", "canvas_hw"),
    [
        ((480, 640), (512, 672)),
        ((640, 480), (672, 512)),
        ((500, 500), (672, 672)),
        ((720, 1280), (384, 672)),  # 360 + 16 px
        ((738, 1280), (416, 672)),  # 369 + 16 px
        ((1, 5000), (32, 672)),
        ((375, 500), (512, 672)),  # smaller images are enlarged
    ],
)
def test_a_rectangle_leaves_half_a_stride_around_the_image(image_hw, canvas_hw):
    assert CanvasRule(640, 32).canvas_hw(image_hw) == canvas_hw


@pytest.mark.parametrize("imgsz", [64, 320, 640])
@pytest.mark.parametrize("stride", [8, 32, 64])
def test_canvases_are_the_smallest_that_hold_image_and_padding(imgsz, stride):
    rng = np.random.default_rng(0)
    for height, width in rng.integers(1, 3000, (200, 2)).tolist():
        canvas = CanvasRule(imgsz, stride).canvas_hw((height, width))
        for side, total in zip((height, width), canvas):
            least = side * imgsz / max(height, width) + stride / 2
            assert total % stride == 0
            assert least - 1e-6 <= total < least + stride + 1e-6
        fit = fit_letterbox((height, width), canvas, imgsz)
        assert max(fit.width, fit.height) == imgsz
        for padding, used, total in ((fit.pad_x, fit.width, canvas[1]), (fit.pad_y, fit.height, canvas[0])):
            assert padding >= stride // 4 - 1
            assert abs(total - used - 2 * padding) <= 1  # centered
        assert max(canvas) == imgsz + math.ceil(stride / 2 / stride) * stride


def test_squares_and_canvases_of_a_file_have_no_padding_of_their_own():
    assert CanvasRule(640, 32, is_square=True).canvas_hw((480, 640)) == (640, 640)
    assert CanvasRule(640, 32, is_square=True, fixed_hw=(480, 640)).canvas_hw((640, 480)) == (480, 640)
    assert CanvasRule(640, 32, fixed_hw=(480, 640)).canvas_hw((100, 100)) == (480, 640)
