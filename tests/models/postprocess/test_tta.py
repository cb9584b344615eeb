"""Test-time augmentation: boxes of every view are returned in canvas pixels, and equal those of each view run alone."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from models.detector import build_detector
from models.postprocess.tta import VIEWS, TestTimeAugmentation
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL
from utils import pixels

GRAY = pixels.GRAY / 255


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (TINY_MODEL, ("light", "dark")),
        (TINY_ANCHOR_MODEL, ("light", "dark")),
        (TINY_MODEL, ("arrow left", "arrow right")),
    ],
)
def test_predictions_equal_those_of_each_view_alone(spec, names):
    """A mirrored left arrow is a right arrow."""
    detector = build_detector(spec, 2, names=names, seed=3).fuse()
    images = torch.rand(2, 3, 96, 160, generator=torch.Generator().manual_seed(0))
    model = TestTimeAugmentation(detector)
    with torch.no_grad():
        boxes, scores = model.decode(model(images))
        start = 0
        for scale, mirrored in VIEWS:
            height, width = round(96 * scale), round(160 * scale)
            view = images.flip(3) if mirrored else images
            view = view if scale == 1 else interpolate(view, (height, width), mode="bilinear")
            canvas = torch.full((2, 3, -(-height // 32) * 32, -(-width // 32) * 32), GRAY)
            canvas[:, :, :height, :width] = view
            expected, expected_scores = (t.numpy().astype(np.float64) for t in detector.decode(detector(canvas)))
            if mirrored:
                expected[..., [0, 2]] = width - expected[..., [2, 0]]
                if "arrow left" in names:
                    expected_scores = expected_scores[..., ::-1]
            expected *= np.array([160 / width, 96 / height] * 2)
            end = start + expected.shape[1]
            np.testing.assert_allclose(boxes[:, start:end], expected, rtol=1e-5, atol=1e-4)
            np.testing.assert_array_equal(scores[:, start:end], expected_scores)
            start = end
    assert start == boxes.shape[1] == scores.shape[1]
