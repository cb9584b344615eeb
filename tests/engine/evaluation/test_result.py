"""The scores of a validation."""

import numpy as np

from engine.evaluation.result import f1_score


def test_f1_is_zero_without_precision_and_recall():
    values = f1_score(np.array([0.5, 0.0, 1.0, np.nan]), np.array([0.25, 0.0, 1.0, np.nan]))
    np.testing.assert_allclose(values, [1 / 3, 0, 1, np.nan])
