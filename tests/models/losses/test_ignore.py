"""Regions to ignore: cells inside have no loss and no gradient unless they are assigned to an object, all others have
the same ones as without regions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.tiny import as_targets
from tests.models.losses.cases import CANVAS, HYP, KINDS, REG_MAX, STRIDES, gradients, raw_maps, tiny_head

CLASSES = 3
# image, class (-1: all), cx, cy, w, h
REGIONS = np.float32([[0, -1, 0.25, 0.25, 0.5, 0.5], [0, 2, 0.75, 0.75, 0.3, 0.3], [1, 0, 0.5, 0.5, 0.9, 0.2]])
TARGETS = torch.tensor([[0, 1, 0.2, 0.25, 0.3, 0.3], [1, 2, 0.7, 0.5, 0.4, 0.4]])


def inside(region: np.ndarray, stride: int) -> np.ndarray:
    """bool (h, w), by a loop over cells."""
    _, _, cx, cy, w, h = (region * [1, 1, CANVAS, CANVAS, CANVAS, CANVAS]).tolist()
    side = CANVAS // stride
    found = np.zeros((side, side), bool)
    for row in range(side):
        for column in range(side):
            x, y = (column + 0.5) * stride, (row + 0.5) * stride
            found[row, column] = abs(x - cx) <= w / 2 and abs(y - cy) <= h / 2
    return found


def background(kind: str, raw: torch.Tensor) -> list[tuple[int, torch.Tensor, slice]]:
    """The channels whose targets are 0 in the background, the class (B, h, w) that decides about each (objectness: the
    one that is predicted), and the channels of the same cell's box."""
    if kind == "anchor_free":
        return [(4 * REG_MAX + c, torch.full_like(raw[:, 0], c), slice(0, 4 * REG_MAX)) for c in range(CLASSES)]
    firsts = range(0, raw.shape[1], 5 + CLASSES)
    return [(n + 4, raw[:, n + 5 : n + 5 + CLASSES].argmax(1), slice(n, n + 4)) for n in firsts]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_background_inside_has_no_gradient(kind):
    criterion = tiny_head(kind).build_loss(HYP)
    raw = raw_maps(kind, 2)
    without = gradients(criterion(raw, as_targets(TARGETS)), raw)
    output = criterion(raw, as_targets(TARGETS, REGIONS))
    checked = 0
    for level, grad, plain, stride in zip(raw, gradients(output, raw), without, STRIDES):
        expected = plain.clone()
        for channel, decisive, box in background(kind, level.detach()):
            for region in REGIONS:
                image = int(region[0])
                of = int(region[1])
                is_of = (decisive[image] == of) | (of == -1)
                is_positive = plain[image, box].abs().sum(0) > 0
                ignored = torch.from_numpy(inside(region, stride)) & ~is_positive & is_of
                expected[image, channel][ignored] = 0
                checked += int(ignored.sum())
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)
    assert checked > 30
    assert torch.equal(output.normalizer, criterion(raw, as_targets(TARGETS)).normalizer)
