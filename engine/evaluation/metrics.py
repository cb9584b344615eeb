"""The metrics of a validation: average precision as COCO defines it, equal to pycocotools' on the same boxes;
precision, recall and F1 curves; the confusion matrix.

Legend: D detections, M objects, C classes, A area ranges, T IoU thresholds, R recall points, S confidences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import (
    ALL_SIZES,
    IOU_50,
    IOU_75,
    IOU_THRESHOLDS,
    LARGE,
    MEDIUM,
    SMALL,
    DetectionOutcomes,
    Matches,
    Objects,
    match_by_overlap,
    match_detections,
    overlapping_pairs,
    sort_by_class,
)
from engine.evaluation.result import EvalResult, SizeScores, f1_score, middle_of_best
from models.postprocess.selection import DEFAULT_CONFIDENCE
from utils.detections import DetectionTable
from utils.labels import GroundTruth

RECALL_POINTS = np.linspace(0.0, 1.0, 101)  # COCO's R
CONFIDENCES = np.linspace(0.0, 1.0, 1000)  # S
# No lower threshold is recommended: after an epoch, the best one is often 0.001, at which detect.py draws hundreds of
# boxes on an image.
MIN_THRESHOLD = 0.05
MIN_F1 = 0.1  # with a lower mean F1, fewer than one box in ten is right or one object in ten is found
_SPACING = np.spacing(1)  # COCO adds it to the count of detections


@dataclass(frozen=True)
class ConfidenceCurves:
    """Precision, recall and F1 at IoU 0.5 of the detections that score above each of `CONFIDENCES`; nan for classes
    without objects."""

    precision: np.ndarray  # float64 (C, S); also nan where there is no detection
    recall: np.ndarray  # float64 (C, S)
    f1: np.ndarray  # float64 (C, S)
    # The threshold: from `MIN_THRESHOLD` on, the middle of the confidences around the best mean F1 that lose at most
    # its standard error. With few objects the best one itself is chance (benchmarks/LOG.md, "Threshold"). Or the
    # confidence that the user has chosen. None: none gives a mean F1 of `MIN_F1`.
    threshold: float | None
    shown: int  # index in `CONFIDENCES` of the metrics at ``threshold``, else at `DEFAULT_CONFIDENCE`

    @classmethod
    def of(cls, matches: Matches, chosen: float | None = None) -> ConfidenceCurves:
        """Computes the curves of the detections of ``matches``, or only of those above the confidence ``chosen``."""
        if chosen is not None:
            matches = matches.above(chosen)
        classes = matches.num_classes
        targets = matches.targets()[:, ALL_SIZES]
        steps = CONFIDENCES.size
        exceeded = np.searchsorted(CONFIDENCES, matches.ranked.scores, side="left")  # how many of the confidences
        cell = matches.ranked.classes * (steps + 1) + exceeded

        def counts_above(rows: np.ndarray) -> np.ndarray:
            """Counts the detections ``rows``, bool (D,), above each of the confidences: int64 (C, S)."""
            exceeding = np.bincount(cell[rows], minlength=classes * (steps + 1)).reshape(classes, steps + 1)
            # A score is above confidence s if it exceeds s + 1 of them or more: sums from the last column to the left.
            descending = exceeding[:, 1:][:, ::-1]
            return descending.cumsum(1)[:, ::-1]

        is_correct, is_ignored = matches.outcomes_50()
        tp = counts_above(is_correct)
        detections = counts_above(~is_ignored)
        precision = np.where(detections > 0, tp / np.maximum(detections, 1), np.nan)
        recall = tp / np.maximum(targets, 1)[:, None]
        precision[targets == 0] = np.nan
        recall[targets == 0] = np.nan
        f1 = f1_score(precision, recall)
        first = int(np.searchsorted(CONFIDENCES, MIN_THRESHOLD))
        mean_f1 = nanmean(f1, axis=0)[first:]
        peak = mean_f1.max()
        standard_error = np.sqrt(peak * (1 - peak) / max(targets.sum(), 1))
        shown = first + middle_of_best(mean_f1, standard_error)
        threshold: float | None = float(CONFIDENCES[shown])
        if chosen is not None:
            threshold, shown = chosen, 0  # all are above it
        elif not peak >= MIN_F1:
            threshold, shown = None, int(np.searchsorted(CONFIDENCES, DEFAULT_CONFIDENCE))
        return cls(precision, recall, f1, threshold, shown)


class Metric(NamedTuple):
    """A metric and its names."""

    name: str  # in results.csv and TensorBoard after "metrics/", and in lower case in results.json
    column: str  # in the printed table and classes.csv
    title: str  # its name in charts and messages
    # Maps curves and `interpolated_precision` (C, A, T, R) to float64 (C, ...). The mean for a class is its metric; the
    # mean of all values is the overall metric.
    values: Callable[[ConfidenceCurves, np.ndarray], np.ndarray]


METRICS = (
    Metric(
        "precision",
        "P",
        "precision",
        # 0 for a class without a detection, as its F1, so that the means are over the same classes
        lambda curves, _: np.where(curves.recall[:, curves.shown] == 0, 0.0, curves.precision[:, curves.shown]),
    ),
    Metric("recall", "R", "recall", lambda curves, _: curves.recall[:, curves.shown]),
    Metric("f1", "F1", "F1", lambda curves, _: curves.f1[:, curves.shown]),
    Metric("AP50", "AP50", "AP50", lambda _, interpolated: interpolated[:, ALL_SIZES, IOU_50]),
    Metric("AP75", "AP75", "AP75", lambda _, interpolated: interpolated[:, ALL_SIZES, IOU_75]),
    Metric("AP", "AP", "AP", lambda _, interpolated: interpolated[:, ALL_SIZES]),
)


class Scores(NamedTuple):
    """The scores of detections, and the matches with the objects that give them."""

    result: EvalResult
    sizes: SizeScores
    matches: Matches  # of the detections for AP
    shown: Matches  # of the detections as detect.py finds them, those above `EvalResult.shown_confidence`


def score_detections(
    gt: GroundTruth,
    for_ap: DetectionTable,
    num_classes: int,
    detected: DetectionTable | None = None,
    chosen_confidence: float | None = None,
) -> Scores:
    """Scores detections against labels.

    AP equals COCO's evaluation of boxes to the last digit: 10 IoU thresholds, 101 recall points, the best
    ``gt.max_det`` detections of each class in each image, crowd as ignore regions, size ranges by ``area_px``. Equal
    scores rank by the order of ``gt.image_ids``, then of the table, as they would from a predictions file.

    Precision, recall, F1 and the confusion matrix are those of one matching at IoU 0.5, above the chosen confidence or
    `ConfidenceCurves.threshold`. A class without a detection has precision, recall and F1 of 0. The scores of classes
    without objects are nan, and the means leave them out.

    Args:
        for_ap: detections whose AP is computed.
        detected: detections as detect.py finds them, for all other scores; None: the same.
        chosen_confidence: of precision, recall, F1 and the confusion matrix; None: `ConfidenceCurves.threshold`.
    """

    def curves_and_shown(matches: Matches) -> tuple[ConfidenceCurves, float, Matches]:
        """Returns the curves, the confidence above which detections are shown, and the matches of these."""
        curves = ConfidenceCurves.of(matches, chosen_confidence)
        best = DEFAULT_CONFIDENCE if curves.threshold is None else curves.threshold
        confidence = best if chosen_confidence is None else chosen_confidence
        return curves, confidence, matches.above(confidence)

    # Matches take gigabytes for a large split: of ``detected``, only those above the threshold are kept.
    of_detected = None if detected is None else curves_and_shown(match_detections(gt, detected, num_classes))
    matches = match_detections(gt, for_ap, num_classes)
    curves, shown_confidence, shown = of_detected or curves_and_shown(matches)
    outcomes = sort_by_class(matches)
    precision = interpolated_precision(outcomes, matches.targets())
    values = {m.name: m.values(curves, precision) for m in METRICS}
    result = EvalResult(
        metrics={m.name: float(nanmean(values[m.name])) for m in METRICS},
        class_metrics={name: nanmean(v, axis=tuple(range(1, v.ndim))) for name, v in values.items()},
        threshold=curves.threshold,
        shown_confidence=shown_confidence,
        ap_small=float(nanmean(precision[:, SMALL])),
        ap_medium=float(nanmean(precision[:, MEDIUM])),
        ap_large=float(nanmean(precision[:, LARGE])),
        class_targets=gt.boxes_per_class(num_classes),
        confusion=confusion_matrix(shown),
        curve_confidence=CONFIDENCES.copy(),
        curve_precision=curves.precision,
        curve_recall=curves.recall,
        pr_recall=RECALL_POINTS.copy(),
        pr_precision=precision[:, ALL_SIZES, IOU_50].copy(),
        num_images=gt.num_images,
    )
    return Scores(result, _size_scores(outcomes, matches.targets(), precision), matches, shown)


def _size_scores(outcomes: DetectionOutcomes, targets: np.ndarray, precision: np.ndarray) -> SizeScores:
    """Computes COCO's scores for its four sizes. Means over the classes that have objects equal pycocotools'.

    ``targets``: int64 (C, A), number of objects that count; ``precision``: `interpolated_precision`.
    """
    hits = np.stack([outcomes.true_positive[rows].sum(0) for rows in outcomes.of_classes(len(targets))])
    recall = np.full(targets.shape, np.nan)
    has_objects = targets > 0
    recall[has_objects] = (hits[has_objects] / targets[has_objects][:, None]).mean(-1)
    return SizeScores(
        targets=targets,
        ap=nanmean(precision, axis=(2, 3)),
        ap50=nanmean(precision[:, :, IOU_50], axis=2),
        ap75=nanmean(precision[:, :, IOU_75], axis=2),
        recall=recall,
    )


def interpolated_precision(outcomes: DetectionOutcomes, targets: np.ndarray) -> np.ndarray:
    """Computes the largest precision at or beyond each recall point: float64 (C, A, T, R); 0 where the recall is never
    reached, nan where there is no object. ``targets``: int64 (C, A), number of objects that count."""
    classes, areas = targets.shape
    result = np.full((classes, areas, outcomes.true_positive.shape[-1], RECALL_POINTS.size), np.nan)
    result[targets > 0] = 0.0
    for c, rows in enumerate(outcomes.of_classes(classes)):
        if rows.start == rows.stop:
            continue
        for a in np.flatnonzero(targets[c]):
            tp = np.cumsum(outcomes.true_positive[rows, a], axis=0, dtype=np.int32)
            fp = np.cumsum(outcomes.false_positive[rows, a], axis=0, dtype=np.int32)
            precision = tp / (fp + tp + _SPACING)
            envelope = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
            # The recall at a count is compared as COCO does, in floating point; counts are then searched as integers.
            wanted = np.searchsorted(np.arange(targets[c, a] + 1) / targets[c, a], RECALL_POINTS)
            for t in range(tp.shape[1]):
                first = np.searchsorted(tp[:, t], wanted)
                result[c, a, t] = np.where(first < len(tp), envelope[np.minimum(first, len(tp) - 1), t], 0.0)
    return result


def nanmean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Computes the mean of the values that are not nan, like `numpy.nanmean`, but without a warning where there are
    none."""
    valid = ~np.isnan(values)
    count = valid.sum(axis)
    total = np.where(valid, values, 0.0).sum(axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def confusion_matrix(matches: Matches) -> np.ndarray:
    """Counts detections and objects by predicted and true class.

    The diagonal has the true positives of precision and recall: COCO's matches at IoU 0.5, which are of one class. What
    these leave is then matched whatever its class (`confused_objects`). The rest is background. So the sum of a column
    is the number of objects of that class, without crowd regions, and the sum of a row is the number of detections that
    count in the precision of that class: not those in a crowd region of it.

    Returns int64 (C + 1, C + 1): rows predicted, columns true, the last of each is background.
    """
    ranked = matches.ranked
    objects = matches.objects
    background = matches.num_classes
    is_correct, is_ignored = matches.outcomes_50()
    found = matches.detected_objects()
    confused = confused_objects(matches)
    is_left = ~objects.crowd
    is_left[found] = False
    is_left[confused[confused >= 0]] = False
    false = np.flatnonzero(~is_correct & ~is_ignored)
    true_class = matches.object_classes
    confused_class = np.append(true_class, background)[confused[false]]  # -1 is the last one
    row = np.concatenate([true_class[found], ranked.classes[false], np.full(is_left.sum(), background)])
    column = np.concatenate([true_class[found], confused_class, true_class[is_left]])
    size = matches.num_classes + 1
    return np.bincount(row * size + column, minlength=size * size).astype(np.int64).reshape(size, size)


def confused_objects(matches: Matches) -> np.ndarray:
    """Matches the false positives with the objects that no true positive matches, whatever their class: larger IoU
    first, then larger score, at IoU 0.5. Returns the object of each detection, -1 for none: int64 (D,)."""
    ranked = matches.ranked
    objects = matches.objects
    is_correct, is_ignored = matches.outcomes_50()
    is_left = ~objects.crowd
    is_left[matches.detected_objects()] = False
    false = np.flatnonzero(~is_correct & ~is_ignored)
    left = np.flatnonzero(is_left)
    # Pairs of any classes: a group is an image.
    classes = matches.num_classes
    by_image = Objects(objects.group[left] // classes, objects.boxes_xywh[left], objects.crowd[left])
    image = ranked.group[false] // classes
    pairs = overlapping_pairs(image, ranked.boxes_xyxy[false], by_image, float(IOU_THRESHOLDS[IOU_50]))
    confused = match_by_overlap(pairs, ranked.scores[false][pairs.detection], false.size, left.size)
    result = np.full(ranked.scores.size, -1)
    result[false] = np.append(left, -1)[confused]
    return result
