"""Statistics of label errors: probabilities from likelihoods, and values compared within their class.

Legend: n values, each of a detection or a label.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ERROR_RATE = 0.05  # prior probability of each kind of error; affects the order of kinds, hardly the order within one
MIN_MISPLACED_RATE = 0.01  # lower limit of the prior of position errors, which `estimated_rate` estimates
RATE_STEPS = 100  # iterations of `estimated_rate`
MIN_DEVIATION = 0.06  # lower limit of a class's deviation of IoUs: people do not draw boxes more exactly
MAD_TO_DEVIATION = 1.4826  # standard deviation per median absolute deviation, for normally distributed values
MIN_NEIGHBORS = 10  # detections on either side over which precision is averaged


def posterior(if_wrong: np.ndarray, if_right: np.ndarray, rate: float = ERROR_RATE) -> np.ndarray:
    """Computes the probability of an error from the likelihoods of the observation with and without it."""
    wrong = rate * if_wrong
    right = (1 - rate) * if_right
    return np.divide(wrong, wrong + right, out=np.zeros_like(wrong), where=wrong > 0)


def estimated_rate(if_wrong: np.ndarray, if_right: np.ndarray) -> float:
    """Estimates the rate of errors by expectation maximization, within `MIN_MISPLACED_RATE` and `ERROR_RATE`. Arguments
    as in `posterior`."""
    rate = ERROR_RATE
    for _ in range(RATE_STEPS if if_wrong.size else 0):
        rate = float(np.clip(posterior(if_wrong, if_right, rate).mean(), MIN_MISPLACED_RATE, ERROR_RATE))
    return rate


def local_precision(scores: np.ndarray, is_matched: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Estimates precision as the fraction of matched detections among those of the class with similar scores, made
    monotonic in the score: float64 (n,)."""
    result = np.zeros(len(scores))
    for rows in _rows_by_class(classes):
        rows = rows[np.argsort(scores[rows], kind="stable")]
        total = np.r_[0, np.cumsum(is_matched[rows])]
        half = max(MIN_NEIGHBORS, len(rows) // 50)
        low = np.maximum(np.arange(len(rows)) - half, 0)
        high = np.minimum(np.arange(len(rows)) + half + 1, len(rows))
        result[rows] = np.maximum.accumulate((total[high] - total[low]) / (high - low))
    return result


def deviations_below(overlap: np.ndarray, classes: np.ndarray, *, min_overlap: float) -> np.ndarray:
    """Returns how many robust standard deviations each IoU (n,) is below the median of its class; at least 0.

    IoUs below ``min_overlap`` count neither for the deviation nor for the median.
    """
    result = np.zeros(len(overlap))
    for rows in _rows_by_class(classes):
        agreed = overlap[rows][overlap[rows] >= min_overlap]
        if agreed.size:
            median = np.median(agreed)
            deviation = max(MAD_TO_DEVIATION * float(np.median(np.abs(agreed - median))), MIN_DEVIATION)
            result[rows] = np.maximum((median - overlap[rows]) / deviation, 0)
    return result


def fraction_at_most(values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Returns for each value the fraction of its class's values that are at most as large: float64 (n,)."""
    result = np.ones(len(values))
    for rows in _rows_by_class(classes):
        result[rows] = np.searchsorted(np.sort(values[rows]), values[rows], side="right") / len(rows)
    return result


def _rows_by_class(classes: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the rows of each class, ascending."""
    for c in np.unique(classes):
        yield np.flatnonzero(classes == c)
