"""The anchor check: recall by hand, refitting only where it helps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.assigners.anchor import match_anchors
from models.autoanchor import fitted_anchors, recall_and_fitness

COCO_PX = [[[10, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 119]], [[116, 90], [156, 198], [373, 326]]]
STRIDES = (8, 16, 32)


def anchor_head(strides=STRIDES, anchors_px=COCO_PX) -> SimpleNamespace:
    pixels = torch.tensor(anchors_px, dtype=torch.float32)
    anchors = pixels / torch.tensor(strides, dtype=torch.float32)[:, None, None]
    return SimpleNamespace(strides=strides, anchors=anchors)


def clustered(seed: int = 0) -> np.ndarray:
    """Returns long thin boxes, which the default anchors do not match."""
    rng = np.random.default_rng(seed)
    shapes = np.array([[200, 12], [300, 16], [12, 220], [90, 6], [150, 10]])
    return shapes[rng.integers(0, 5, 500)] * np.exp(rng.normal(0, 0.15, (500, 2)))


def test_recall_equals_the_fraction_that_the_assigner_matches():
    head = anchor_head()
    boxes = np.exp(np.random.default_rng(1).uniform(np.log(3), np.log(500), (300, 2)))
    line, _ = fitted_anchors(boxes, head, anchor_t=4.0, reason_to_keep="not here")
    targets = torch.zeros(300, 6)
    targets[:, 2:4] = 0.5
    targets[:, 4:] = torch.from_numpy(boxes / 640).float()
    matched = torch.zeros(300, dtype=torch.bool)
    for stride, anchors in zip(STRIDES, head.anchors):
        valid = match_anchors(targets, anchors, (640 // stride, 640 // stride), 4.0).valid
        matched |= valid.view(300, -1).any(-1)
    assert f"{float(matched.float().mean()):.1%} of boxes can be matched" in line


def test_good_anchors_are_kept():
    head = anchor_head()
    boxes = np.random.default_rng(0).uniform(20, 300, (200, 1)) * np.array([[1.0, 1.2]])
    assert fitted_anchors(boxes, head, anchor_t=4.0)[1] is None


@pytest.mark.parametrize("strides", [(8, 16, 32), (32, 16, 8)])
def test_poor_anchors_are_refitted(strides):
    head = anchor_head(strides, COCO_PX if strides[0] == 8 else COCO_PX[::-1])
    boxes = clustered()
    before, _ = recall_and_fitness(boxes, np.array(COCO_PX, dtype=float).reshape(-1, 2), 4.0)
    _, fitted = fitted_anchors(boxes, head, anchor_t=4.0)
    assert (fitted.shape, fitted.dtype) == (head.anchors.shape, head.anchors.dtype)
    pixels = fitted.double().numpy() * np.array(strides)[:, None, None]
    after, _ = recall_and_fitness(boxes, pixels.reshape(-1, 2), 4.0)
    assert before < 0.9 < 0.99 < after
    by_stride = pixels[np.argsort(strides)].reshape(-1, 2).prod(-1)
    assert (np.diff(by_stride) >= 0).all(), "small anchors on fine levels"
