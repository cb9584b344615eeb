"""The result of a validation: its scores, and the detections that they are about.

Legend: C classes, S confidences of a curve, A area ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.evaluation.matching import Matches
from utils.batches import Batch, map_tensors
from utils.detections import Detections, DetectionTable

PREVIEW_IMAGES = 8


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Scores of one validation.

    AP is COCO's (101 recall points, at most `GroundTruth.max_det` detections of each class in each image). Scores of
    classes without ground truth are nan and do not count in means.
    """

    metrics: dict[str, float]  # means over classes, by the names listed in engine/evaluation/metrics.py
    class_metrics: dict[str, np.ndarray]  # float64 (C,), by the same names
    threshold: float | None  # see `ConfidenceCurves`; None: detections are too bad for one
    # Of precision, recall, F1 and what is shown: the user's choice, else `threshold`, else detect.py's default.
    shown_confidence: float
    ap_small: float  # IoU 0.50:0.95
    ap_medium: float
    ap_large: float
    class_targets: np.ndarray  # int64 (C,) boxes that are not crowd
    # int64 (C + 1, C + 1): rows predicted, columns true, last is background. The diagonal has the true positives of
    # precision and recall.
    confusion: np.ndarray
    curve_confidence: np.ndarray  # float64 (S,)
    curve_precision: np.ndarray  # float64 (C, S) against confidence; nan above the best score of a class
    curve_recall: np.ndarray  # float64 (C, S)
    pr_recall: np.ndarray  # float64 (101,)
    pr_precision: np.ndarray  # float64 (C, 101) at IoU 0.5
    num_images: int
    protocol: str = ""  # how AP was measured, see `protocol_text`
    extras: dict[str, float] = field(default_factory=dict)  # validation losses, milliseconds per image

    @property
    def ap(self) -> float:
        """AP at IoU 0.50:0.95; nan without ground truth."""
        return self.metrics["AP"]

    @property
    def class_ap(self) -> np.ndarray:
        """AP of each class at IoU 0.50:0.95: float64 (C,)."""
        return self.class_metrics["AP"]

    @property
    def curve_f1(self) -> np.ndarray:
        """F1 of each class against confidence: float64 (C, S)."""
        return f1_score(self.curve_precision, self.curve_recall)

    @property
    def best_f1(self) -> tuple[np.ndarray, np.ndarray]:
        """The best F1 at any confidence, and this confidence: float64 (1 + C,) each, first of the mean over the classes
        with objects, then of each class; nan without a true positive."""
        class_f1 = np.nan_to_num(self.curve_f1)
        with_objects = class_f1[self.class_targets > 0]
        mean_f1 = with_objects.mean(0) if len(with_objects) else np.zeros_like(self.curve_confidence)
        f1 = np.vstack([mean_f1, class_f1])
        best = np.array([middle_of_best(values) for values in f1], dtype=np.int64)
        has_best = f1.max(1) > 0
        confidence = np.where(has_best, self.curve_confidence[best], np.nan)
        return np.where(has_best, f1.max(1), np.nan), confidence

    @property
    def missed_at_best_confidence(self) -> np.ndarray:
        """Classes that have true positives at a low confidence, but none at `shown_confidence`: int64 (n,)."""
        return np.flatnonzero((self.class_metrics["recall"] == 0) & (self.curve_recall[:, 0] > 0))


class Preview(NamedTuple):
    """The first images of a batch that was validated, and its detections, on the host."""

    batch: Batch  # ``images`` has at most `PREVIEW_IMAGES`
    detections: Detections  # as detect.py finds them, canvas pixels

    @staticmethod
    def of(batch: Batch, detections: Detections) -> Preview:
        batch = replace(batch, images=batch.images[:PREVIEW_IMAGES])
        return Preview(map_tensors(batch, _host_copy), Detections(*map(_host_copy, detections)))


def _host_copy(tensor: Tensor) -> Tensor:
    """Copies a tensor to the host. Without the copy, a view would keep its whole base tensor in memory and in
    pickles."""
    return tensor.to("cpu", copy=True)


class SizeScores(NamedTuple):
    """Scores of each class and size; nan where there is no object."""

    targets: np.ndarray  # int64 (C, A)
    ap: np.ndarray  # float64 (C, A) IoU 0.50:0.95
    ap50: np.ndarray  # float64 (C, A)
    ap75: np.ndarray  # float64 (C, A)
    recall: np.ndarray  # float64 (C, A) COCO's AR: recall of all detections that count, mean over IoU 0.50:0.95


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of a validation, with the detections that it is about, sorted by image, and their matches."""

    result: EvalResult
    sizes: SizeScores
    matches: Matches  # of ``for_ap``
    shown: Matches  # of ``detected`` above `EvalResult.shown_confidence`
    for_ap: DetectionTable
    detected: DetectionTable  # as detect.py finds them: P, R, F1 and the confusion matrix
    preview: Preview | None  # of the first batch on rank 0; None: rank 0 had no images


def f1_score(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Returns the harmonic mean of precision and recall, of any shape; 0 where recall is 0, whatever precision is."""
    is_zero = recall == 0
    return np.where(is_zero, 0.0, 2 * precision * recall / np.where(is_zero, 1.0, precision + recall))


def middle_of_best(f1: np.ndarray, tolerance: float = 0.0) -> int:
    """Returns the middle of the confidences around the best F1, float64 (S,), whose F1 is positive and at most
    ``tolerance`` lower; 0 if all are nan.

    The middle keeps a distance from the scores on both sides, which rounding may change.
    """
    if np.isnan(f1).all():
        return 0
    best = int(np.nanargmax(f1))
    is_lower = ~((f1 >= f1[best] - tolerance) & ((f1 > 0) | (f1[best] <= 0)))
    below, above = np.flatnonzero(is_lower[:best]), np.flatnonzero(is_lower[best:])
    first = below[-1] + 1 if below.size else 0
    last = best + above[0] - 1 if above.size else f1.size - 1
    return int(first + last) // 2
