"""Folds: whole groups, every class spread evenly, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from data.folds.assign import assign_folds
from tests.helpers.messages import refused


def random_groups(seed: int, images: int = 300, groups: int = 90, classes: int = 6):
    """Draws groups of 1 to many images, and classes from frequent to rare."""
    rng = np.random.default_rng(seed)
    group = np.unique(np.r_[np.arange(groups), rng.integers(0, groups, images - groups)], return_inverse=True)[1]
    rates = 3.0 / 2 ** np.arange(classes)
    return rng.permutation(group), rng.poisson(rates, (images, classes))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("folds", [2, 5])
def test_groups_stay_together_and_classes_are_spread(seed, folds):
    group, counts = random_groups(seed)
    fold = assign_folds(group, counts, folds, seed)
    assert set(fold) == set(range(folds))
    for number in range(group.max() + 1):
        assert len(set(fold[group == number])) == 1
    by_group = np.zeros((group.max() + 1, counts.shape[1]), int)
    np.add.at(by_group, group, counts)
    of_fold = np.stack([counts[fold == k].sum(0) for k in range(folds)])
    # No fold differs from an even share by more than the boxes of this class in the largest group, and a few more.
    assert (np.abs(of_fold - counts.sum(0) / folds) <= by_group.max(0) + 3).all(), of_fold
    images = np.bincount(fold)
    assert np.abs(images - len(group) / folds).max() <= 0.25 * len(group) / folds


def test_a_seed_decides_the_folds_and_every_fold_gets_a_group():
    """In one of the sets, all boxes are in two images."""
    group, counts = random_groups(2)
    first, again, other = (assign_folds(group, counts, 3, seed) for seed in (4, 4, 5))
    assert (first == again).all()
    assert (first != other).any()
    counts = np.zeros((20, 2), int)
    counts[:3, 0] = 1
    fold = assign_folds(np.arange(20), counts, 4, 0)
    assert np.bincount(fold).tolist() == [5, 5, 5, 5]  # images without boxes fill them up
    assert len(set(fold[:3])) == 3
    counts = np.array([[9], [9], [0], [0]])
    assert sorted(assign_folds(np.arange(4), counts, 4, 0)) == [0, 1, 2, 3]
    with refused("--folds 3: the images form only 2 groups; use fewer folds"):
        assign_folds(np.array([0, 1, 1]), counts[:3], 3, 0)
