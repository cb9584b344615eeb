"""Test-time augmentation: boxes of every view are returned in canvas pixels, and equal those of each view run alone."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from models.detector import build_detector
from models.postprocess.tta import IDENTITY, VIEWS, TestTimeAugmentation, View
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL
from utils import structures

GRAY = structures.GRAY / 255


class BrightBox(nn.Module):
    """A stand-in for a detector that finds the outline of a bright region, to a fraction of a pixel."""

    strides, stride = (8, 16, 32), 32

    def forward(self, images):
        light = (images.mean(1) - GRAY).clamp(min=0) / (1 - GRAY)
        across, down = light.amax(1), light.amax(2)
        corners = []
        for line in (across, down):
            size = line.shape[1]
            left = (line > 0.5).float().argmax(1)
            right = size - 1 - (line.flip(1) > 0.5).float().argmax(1)
            # The pixel outside the first bright one is lit in proportion to the part that the box covers.
            before = line.gather(1, (left - 1).clamp(min=0)[:, None])[:, 0] * (left > 0)
            after = line.gather(1, (right + 1).clamp(max=size - 1)[:, None])[:, 0] * (right < size - 1)
            corners += [
                left + 1 - line.gather(1, left[:, None])[:, 0] - before,
                right + line.gather(1, right[:, None])[:, 0] + after,
            ]
        box = torch.stack([corners[0], corners[2], corners[1], corners[3]], 1)
        return [box[:, :, None, None].expand(-1, -1, images.shape[2] // s, images.shape[3] // s) for s in self.strides]

    def decode(self, raw):
        boxes = raw[0][:, :, 0, 0][:, None]
        return boxes, torch.ones_like(boxes[..., :1])


@pytest.mark.parametrize("canvas", [(64, 64), (96, 224), (160, 128)])
def test_all_views_find_an_object_where_it_is(canvas):
    height, width = canvas
    corners = torch.tensor([[9, 13, 37, 41], [0, 0, 20, 30], [width - 30, height - 25, width, height]])
    images = torch.full((3, 3, height, width), GRAY)
    for image, (x1, y1, x2, y2) in zip(images, corners.tolist()):
        image[:, y1:y2, x1:x2] = 1.0
    views = (IDENTITY, View(1.0, True), View(0.83, True), View(0.67, False), View(0.5, True), View(1.3, True))
    model = TestTimeAugmentation(BrightBox(), views)
    boxes, scores = model.decode(model(images))
    assert boxes.shape == (3, len(views), 4)
    assert scores.shape == (3, len(views), 1)
    np.testing.assert_array_equal(boxes[:, :2], corners[:, None].expand(-1, 2, -1).float())
    np.testing.assert_allclose(boxes, corners[:, None].expand(-1, len(views), -1).float(), atol=0.75)


@pytest.mark.parametrize("spec", [TINY_MODEL, TINY_ANCHOR_MODEL])
def test_predictions_equal_those_of_each_view_alone(spec):
    detector = build_detector(spec, 2, seed=3).fuse()
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
            expected *= np.array([160 / width, 96 / height] * 2)
            end = start + expected.shape[1]
            np.testing.assert_allclose(boxes[:, start:end], expected, rtol=1e-5, atol=1e-4)
            np.testing.assert_array_equal(scores[:, start:end], expected_scores)
            start = end
    assert start == boxes.shape[1] == scores.shape[1]


def test_one_view_is_the_detector_itself():
    detector = build_detector(TINY_MODEL, 2, seed=3).fuse()
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model = TestTimeAugmentation(detector, (IDENTITY,))
    with torch.no_grad():
        for ours, plain in zip(model.decode(model(images)), detector.decode(detector(images))):
            assert torch.equal(ours, plain)
    with pytest.raises(ValueError, match="identity"):
        TestTimeAugmentation(detector, (View(0.5, False),))
