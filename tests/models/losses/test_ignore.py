"""Regions to ignore: cells inside have no loss and no gradient unless they are assigned to an object, all others have
the same ones as without regions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.losses.base import ignored_cells
from tests.models.losses.test_losses import CANVAS, HYP, KINDS, REG_MAX, STRIDES, gradients, raw_maps, tiny_head

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


def test_cells_are_those_of_a_loop():
    raw = raw_maps("anchor_free", 2)
    found = ignored_cells(REGIONS, raw, STRIDES, CLASSES).numpy()
    expected = np.zeros((2, found.shape[1], CLASSES), bool)
    for region in REGIONS:
        cells = np.concatenate([inside(region, stride).ravel() for stride in STRIDES])
        image, kind = int(region[0]), int(region[1])
        for c in range(CLASSES) if kind < 0 else [kind]:
            expected[image, :, c] |= cells
    np.testing.assert_array_equal(found, expected)
    assert ignored_cells(None, raw, STRIDES, CLASSES) is None


def background(kind: str, channels: int) -> list[tuple[int, int | None, slice]]:
    """The channels whose targets are 0 in the background, the class of each (None: all), and the channels of the same
    cell's box."""
    if kind == "anchor_free":
        return [(4 * REG_MAX + c, c, slice(0, 4 * REG_MAX)) for c in range(CLASSES)]
    width = 5 + CLASSES
    return [(first + 4, None, slice(first, first + 4)) for first in range(0, channels, width)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_background_inside_has_no_gradient(kind):
    criterion, raw = tiny_head(kind).build_loss(HYP), raw_maps(kind, 2)
    without = gradients(criterion(raw, TARGETS, 16), raw)
    output = criterion(raw, TARGETS, 16, None, REGIONS)
    checked = 0
    for grad, plain, stride in zip(gradients(output, raw), without, STRIDES):
        expected = plain.clone()
        for channel, class_id, box in background(kind, plain.shape[1]):
            for region in REGIONS:
                image, of = int(region[0]), int(region[1])
                if class_id is not None and of not in (-1, class_id):
                    continue
                is_positive = plain[image, box].abs().sum(0) > 0
                ignored = torch.from_numpy(inside(region, stride)) & ~is_positive
                expected[image, channel][ignored] = 0
                checked += int(ignored.sum())
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)
    assert checked > 30
    assert torch.equal(output.normalizer, criterion(raw, TARGETS, 16).normalizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_over_everything_leaves_the_positives_alone(kind):
    raw, everywhere = raw_maps(kind, 2), np.float32([[0, -1, 0.5, 0.5, 1, 1], [1, -1, 0.5, 0.5, 1, 1]])
    criterion = tiny_head(kind).build_loss(HYP)
    empty = criterion(raw, TARGETS[:0], 16, None, everywhere)
    assert empty.total == 0
    found = criterion(raw, TARGETS, 16, None, everywhere)
    assert 0 < found.total < criterion(raw, TARGETS, 16).total
