"""The accuracy protocol: declared variants, copies of data sets, and differences with intervals."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.accuracy.summary import VariantScores, difference

pytestmark = pytest.mark.benchmarks


def test_the_interval_covers_sets_seeds_and_images():
    """With independent normal noise of the three kinds, the variance of the draws is that of sampling."""
    rng = np.random.default_rng(0)
    sets = 40
    seeds = 30
    draws = 4000
    sides = [{}, {}]
    gains = rng.normal(0.02, 0.03, sets)
    for number in range(sets):
        images = rng.normal(0, 0.01, draws)  # drawn for both sides alike, so it cancels
        for side, gain in zip(sides, (0.0, gains[number])):
            ap = 0.5 + gain + rng.normal(0, 0.02, seeds)
            side[str(number)] = VariantScores(ap, ap[:, None] + images, np.zeros(seeds))
    by_set, drawn = difference(*sides)
    assert np.mean(list(by_set.values())) == pytest.approx(gains.mean(), abs=0.002)
    expected = np.var(list(by_set.values())) / sets + 2 * 0.02**2 / seeds / sets
    assert drawn.var() == pytest.approx(expected, rel=0.15)
