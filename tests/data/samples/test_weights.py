"""How often samples occur in an epoch: repeat factors, class weights, and whole sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from data.loading.sampler import EpochOrder, TrainCanvases
from data.samples.weights import image_weights, repeat_factors, with_whole_sum
from utils.labels import LabelArrays


@dataclass(frozen=True)
class SimpleLabels(LabelArrays):
    offsets: np.ndarray
    classes: np.ndarray
    crowd: np.ndarray


def test_repeat_factors_are_those_of_the_paper():
    """Gupta et al. 2019: sqrt(t / f) of the rarest class, where f is the fraction of images that have it."""
    rng = np.random.default_rng(0)
    classes_of = [rng.choice(4, rng.integers(0, 4), p=[0.7, 0.2, 0.08, 0.02]) for _ in range(300)]
    offsets = np.cumsum([0, *map(len, classes_of)])
    is_object = rng.random(offsets[-1]) > 0.05
    kept = [{int(c) for c, ok in zip(cs, is_object[start:]) if ok} for cs, start in zip(classes_of, offsets)]
    fraction = [sum(c in cs for cs in kept) / 300 for c in range(4)]
    expected = [max((max(1, math.sqrt(0.2 / fraction[c])) for c in cs), default=1) for cs in kept]
    labels = SimpleLabels(offsets, np.concatenate(classes_of).astype(int), ~is_object)
    factors = repeat_factors(0.2, labels, 4, np.ones(300))
    np.testing.assert_allclose(factors, expected)
    assert factors.max() > 2

    # Images that never come, such as most tiles without objects, make no class rarer.
    empty = SimpleLabels(np.concatenate([offsets, np.full(700, offsets[-1])]), labels.classes, labels.crowd)
    weights = np.repeat([1.0, 0.0], [300, 700])
    np.testing.assert_allclose(repeat_factors(0.2, empty, 4, weights)[:300], expected)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([1, 1, *[0.1] * 4], [1, 1, *[0.25] * 4]),  # in all, less than half a sample an epoch
        ([0.2, 0.6, 0.95], [0.36, 0.68, 0.96]),
        ([1.7, 2.0, 3.2, 1.0, 0.4], None),
        ([1 + 2e-16, 1, 2 - 1e-15, 0, 1e-16], [1, 1, 2, 0, 0]),  # rounding errors repeat no sample
    ],
)
def test_samples_come_as_often_as_their_weights_say(weights, whole):
    """Fractional weights change alike, so that their sum is whole."""
    weights = np.array(weights)
    changed = with_whole_sum(weights)
    if whole is not None:
        np.testing.assert_allclose(changed, whole, atol=1e-12)
    order = EpochOrder(changed, seed=4, batch_size=16, canvases=TrainCanvases(320, 32))
    counts = np.stack([np.bincount(order.indices(epoch), minlength=len(weights)) for epoch in range(400)])
    is_whole = weights % 1 == 0
    assert (counts[:, is_whole] == weights[is_whole]).all()
    assert set(counts.sum(1)) == {len(order)} == {round(changed.sum())}
    np.testing.assert_allclose(counts.mean(0), changed, atol=0.1)


def test_image_weights_sum_class_weights_and_handle_backgrounds_crowds_and_zeros():
    labels = SimpleLabels(np.array([0, 2, 2, 3, 4]), np.array([0, 1, 1, 0]), np.array([False, False, False, True]))
    np.testing.assert_allclose(image_weights(np.array([1.0, 3.0]), labels), [4, 3.5, 3, 3.5])
    np.testing.assert_allclose(image_weights(np.zeros(2), labels), np.ones(4))
