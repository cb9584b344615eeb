"""What detections tell beyond their scores: how errors divide, AP by size, and whether confidences mean what they say.

The reliability curve and the expected calibration error (Guo et al. 2017) are as Küppers et al. 2020 have them for
detections: correct is one that takes an object of its class at IoU 0.5; those in a crowd are not counted.

Legend: K bins of confidence, D detections.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.evaluation.average_precision import interpolated_precision, mean_known
from engine.evaluation.matching import AREA_RANGES, IOU_THRESHOLDS
from engine.evaluation.outcomes import Judgement, Verdicts, judge, sort_by_class
from engine.evaluation.tide import ErrorSplit, split_errors
from utils.structures import DetectionTable, GroundTruth

BINS = 20


class Reliability(NamedTuple):
    """Confidence against precision, in bins of equal width."""

    edges: np.ndarray  # float64 (K + 1,)
    counts: np.ndarray  # int64 (K,)
    confidence: np.ndarray  # float64 (K,) mean of the bin's detections; nan where there is none
    precision: np.ndarray  # float64 (K,) share of them that is right

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance of confidence and precision, by detections. nan without any."""
        if not self.counts.any():
            return float("nan")
        return float(np.nansum(self.counts * np.abs(self.confidence - self.precision)) / self.counts.sum())

    @property
    def bias(self) -> float:
        """Mean confidence less precision, above 0 for a detector too sure of itself. nan without detections."""
        if not self.counts.any():
            return float("nan")
        return float(np.nansum(self.counts * (self.confidence - self.precision)) / self.counts.sum())


class Calibration(NamedTuple):
    """Of all detections that were scored, most of which say themselves that they are hardly anything; and of those
    that a user sees."""

    scored: Reliability
    shown: Reliability
    threshold: float  # the confidence from which on detections are shown


def measure_calibration(verdicts: Verdicts, threshold: float, *, bins: int = BINS) -> Calibration:
    """``threshold`` as a rule is the confidence with the best F1."""
    right, wrong = verdicts.plain()
    counted = right | wrong
    scores, right = verdicts.scores[counted], right[counted]
    shown = scores >= threshold
    return Calibration(_reliability(scores, right, bins), _reliability(scores[shown], right[shown], bins), threshold)


def _reliability(scores: np.ndarray, right: np.ndarray, bins: int) -> Reliability:
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, scores, side="right") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    known = np.where(counts > 0, counts, np.nan)
    return Reliability(
        edges=edges,
        counts=counts,
        confidence=np.bincount(place, scores, minlength=bins) / known,
        precision=np.bincount(place, right, minlength=bins) / known,
    )


SIZES = ("all", "small", "medium", "large")


class SizeScores(NamedTuple):
    """Of each class and size; nan where there is no object."""

    targets: np.ndarray  # int64 (C, A)
    ap: np.ndarray  # float64 (C, A) IoU 0.50:0.95
    ap50: np.ndarray  # float64 (C, A)
    ap75: np.ndarray  # float64 (C, A)
    recall: np.ndarray  # float64 (C, A) COCO's AR: of all detections that count, mean over IoU 0.50:0.95


def score_sizes(judgement: Judgement) -> SizeScores:
    """COCO's scores at its four sizes. Means over the classes that have objects are those of pycocotools."""
    verdicts, targets = sort_by_class(judgement), judgement.targets()
    precision = interpolated_precision(verdicts, targets)
    found = np.zeros((*targets.shape, IOU_THRESHOLDS.size), dtype=np.int64)
    np.add.at(found, verdicts.classes[verdicts.contender], verdicts.right)
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


def size_limits() -> dict[str, tuple[float, float]]:
    """Areas in pixels from and up to which an object has a size."""
    return {name: (float(low), float(high)) for name, (low, high) in zip(SIZES, AREA_RANGES)}


class Analysis(NamedTuple):
    errors: ErrorSplit
    calibration: Calibration
    sizes: SizeScores | None  # only where asked for


def analyse(
    gt: GroundTruth, table: DetectionTable, num_classes: int, *, threshold: float, per_size: bool = False
) -> Analysis:
    """``threshold`` is the confidence from which on detections are shown to a user."""
    judgement = judge(gt, table, num_classes)
    return Analysis(
        errors=split_errors(judgement),
        calibration=measure_calibration(sort_by_class(judgement), threshold),
        sizes=score_sizes(judgement) if per_size else None,
    )
