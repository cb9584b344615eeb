"""Whether confidences mean what they say: of the detections with confidence 0.7, are 70 % right?

The reliability curve and the expected calibration error (Guo et al. 2017), for detections as Küppers et al. 2020
("Multivariate Confidence Calibration for Object Detection") have it: right is a detection that takes an object of its
class at IoU 0.5. Detections in a crowd count neither way.

Legend: K bins of confidence, D detections.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.verdicts import Verdicts

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
