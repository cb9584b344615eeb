"""What val.py measures besides the metrics: kinds of errors, AP by object size, and calibration.

The reliability diagram and the expected calibration error (Guo et al. 2017) are those of Küppers et al. 2020 for
detections: true positives at IoU 0.5 are correct; detections in a crowd region are not counted.

Legend: K bins of confidence, D detections, C classes, A sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import IOU_THRESHOLDS, Matches, Outcomes, match_detections, sort_by_class
from engine.evaluation.metrics import interpolated_precision, mean_known
from engine.evaluation.tide import ErrorSplit, split_errors
from utils.structures import DetectionTable, GroundTruth

BINS = 20
SIZES = ("all", "small", "medium", "large")  # of `AREA_RANGES`


class Reliability(NamedTuple):
    """Precision against confidence, in bins of equal width."""

    edges: np.ndarray  # float64 (K + 1,)
    counts: np.ndarray  # int64 (K,)
    confidence: np.ndarray  # float64 (K,) mean over the bin's detections; nan where there is none
    precision: np.ndarray  # float64 (K,) of the bin's detections

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance between confidence and precision, weighted by detections; nan
        without detections."""
        return self._mean(np.abs(self.confidence - self.precision))

    @property
    def bias(self) -> float:
        """Mean confidence minus precision, above 0 for an overconfident detector; nan without detections."""
        return self._mean(self.confidence - self.precision)

    def _mean(self, gaps: np.ndarray) -> float:
        total = self.counts.sum()
        return float(np.nansum(self.counts * gaps) / total) if total else float("nan")


class Calibration(NamedTuple):
    scored: Reliability  # of all detections, most of which have a low confidence
    shown: Reliability  # of those that a user sees
    threshold: float  # the least confidence of those


def measure_calibration(outcomes: Outcomes, threshold: float, *, bins: int = BINS) -> Calibration:
    """``threshold`` is usually the confidence with the best F1."""
    true_positive, false_positive = outcomes.at_first_iou()
    counted = true_positive | false_positive
    scores, tp = outcomes.scores[counted], true_positive[counted]
    shown = scores >= threshold
    return Calibration(_reliability(scores, tp, bins), _reliability(scores[shown], tp[shown], bins), threshold)


def _reliability(scores: np.ndarray, true_positive: np.ndarray, bins: int) -> Reliability:
    edges = np.linspace(0.0, 1.0, bins + 1)
    index = np.clip(np.searchsorted(edges, scores, side="right") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    known = np.where(counts > 0, counts, np.nan)
    return Reliability(
        edges=edges,
        counts=counts,
        confidence=np.bincount(index, scores, minlength=bins) / known,
        precision=np.bincount(index, true_positive, minlength=bins) / known,
    )


class SizeScores(NamedTuple):
    """Scores of each class and size; nan where there is no object."""

    targets: np.ndarray  # int64 (C, A)
    ap: np.ndarray  # float64 (C, A) IoU 0.50:0.95
    ap50: np.ndarray  # float64 (C, A)
    ap75: np.ndarray  # float64 (C, A)
    recall: np.ndarray  # float64 (C, A) COCO's AR: recall of all detections that count, mean over IoU 0.50:0.95


def score_sizes(matches: Matches) -> SizeScores:
    """COCO's scores for its four sizes. Means over the classes that have objects equal those of pycocotools."""
    outcomes, targets = sort_by_class(matches), matches.targets()
    precision = interpolated_precision(outcomes, targets)
    found = np.zeros((*targets.shape, IOU_THRESHOLDS.size), dtype=np.int64)
    np.add.at(found, outcomes.classes[outcomes.overlapping], outcomes.true_positive)
    recall = np.full(targets.shape, np.nan)
    some = targets > 0
    recall[some] = (found[some] / targets[some][:, None]).mean(-1)
    return SizeScores(
        targets=targets,
        ap=mean_known(precision, axis=(2, 3)),
        ap50=mean_known(precision[:, :, 0], axis=2),
        ap75=mean_known(precision[:, :, 5], axis=2),
        recall=recall,
    )


class Analysis(NamedTuple):
    errors: ErrorSplit
    calibration: Calibration
    sizes: SizeScores | None  # None unless requested


def analyze(
    gt: GroundTruth, table: DetectionTable, num_classes: int, *, threshold: float, per_size: bool = False
) -> Analysis:
    """``threshold``: the least confidence of detections that a user sees."""
    matches = match_detections(gt, table, num_classes)
    return Analysis(
        errors=split_errors(matches),
        calibration=measure_calibration(sort_by_class(matches), threshold),
        sizes=score_sizes(matches) if per_size else None,
    )
