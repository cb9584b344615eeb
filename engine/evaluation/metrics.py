"""The metrics of a validation, in one list. The printed table, classes.csv, results.json, results.csv and TensorBoard
read it: a new metric is a line of `METRICS`.

Legend: C classes, A area ranges, T IoU thresholds, R recall points, S confidences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CONFIDENCES = np.linspace(0.0, 1.0, 1000)  # S


class Scores(NamedTuple):
    """What metrics are computed from; nan for classes without objects. Curves are at IoU 0.5."""

    precision: np.ndarray  # float64 (C, A, T, R) interpolated
    curve_precision: np.ndarray  # float64 (C, S) of the detections at or above each of `CONFIDENCES`
    curve_recall: np.ndarray  # float64 (C, S)
    curve_f1: np.ndarray  # float64 (C, S)
    mean_f1: np.ndarray  # float64 (S,)
    best: int  # where mean_f1 is largest


class Metric(NamedTuple):
    name: str  # in results.csv and TensorBoard after "metrics/", and in lower case in results.json
    column: str  # in the printed table and classes.csv
    values: Callable[[Scores], np.ndarray]  # float64 (C, ...), the mean of which is the metric, of a class or of all
    mean: Callable[[Scores], float] | None = None  # of all classes, if not the mean of all values


METRICS = (
    Metric("precision", "P", lambda s: s.curve_precision[:, s.best]),
    Metric("recall", "R", lambda s: s.curve_recall[:, s.best]),
    Metric("f1", "F1", lambda s: s.curve_f1[:, s.best], lambda s: s.mean_f1[s.best]),
    Metric("AP50", "AP50", lambda s: s.precision[:, 0, 0]),
    Metric("AP75", "AP75", lambda s: s.precision[:, 0, 5]),
    Metric("AP", "AP", lambda s: s.precision[:, 0]),
)


def collect_scores(precision: np.ndarray, curve_precision: np.ndarray, curve_recall: np.ndarray) -> Scores:
    """With the F1 that follows from precision and recall."""
    total = curve_precision + curve_recall
    curve_f1 = 2 * curve_precision * curve_recall / np.where(total > 0, total, 1.0)
    mean_f1 = mean_known(curve_f1, axis=0)
    best = 0 if np.isnan(mean_f1).all() else int(np.argmax(mean_f1))
    return Scores(precision, curve_precision, curve_recall, curve_f1, mean_f1, best)


def overall_metrics(scores: Scores) -> dict[str, float]:
    """Each metric of all classes by name."""
    return {m.name: float(mean_known(m.values(scores)) if m.mean is None else m.mean(scores)) for m in METRICS}


def class_metrics(scores: Scores) -> dict[str, np.ndarray]:
    """Each metric by name: float64 (C,)."""
    values = {m.name: m.values(scores) for m in METRICS}
    return {name: mean_known(v, axis=tuple(range(1, v.ndim))) for name, v in values.items()}


def mean_known(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Mean of the values that are not nan; nan, without a warning, where there is none."""
    valid = ~np.isnan(values)
    count = valid.sum(axis)
    total = np.where(valid, values, 0.0).sum(axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
