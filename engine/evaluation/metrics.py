"""The metrics of a validation: average precision as COCO defines it, equal to pycocotools' on the same boxes;
precision, recall and F1 curves; the confusion matrix; the fitness of an epoch.

Legend: D detections, M objects, C classes, A area ranges, T IoU thresholds, R recall points, S confidences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import (
    ALL_SIZES,
    IOU_50,
    IOU_75,
    LARGE,
    MEDIUM,
    SMALL,
    DetectionOutcomes,
    Objects,
    match_by_overlap,
    match_detections,
    overlapping_pairs,
    sort_by_class,
)
from engine.evaluation.result import EvalResult, f1_score
from models.postprocess.selection import DEFAULT_CONFIDENCE
from utils.class_names import class_numbers
from utils.detections import DetectionTable
from utils.errors import UserError
from utils.labels import GroundTruth
from utils.schema import suggestion

RECALL_POINTS = np.linspace(0.0, 1.0, 101)  # COCO's R
CONFIDENCES = np.linspace(0.0, 1.0, 1000)  # S
CONFUSION_IOU = 0.45
_SPACING = np.spacing(1)  # COCO adds it to the count of detections


@dataclass(frozen=True)
class ConfidenceCurves:
    """Precision, recall and F1 at IoU 0.5 of the detections that score above each of `CONFIDENCES`; nan for classes
    without objects."""

    precision: np.ndarray  # float64 (C, S)
    recall: np.ndarray  # float64 (C, S)
    f1: np.ndarray  # float64 (C, S)
    best: int  # index in `CONFIDENCES` of the largest mean F1

    @classmethod
    def of(cls, outcomes: DetectionOutcomes, targets: np.ndarray) -> ConfidenceCurves:
        """Computes the curves. ``targets``: int64 (C,), number of objects that count."""
        classes = targets.size
        steps = CONFIDENCES.size
        exceeded = np.searchsorted(CONFIDENCES, outcomes.scores, side="left")  # how many of the confidences
        cell = outcomes.classes * (steps + 1) + exceeded

        def counts_above(rows: np.ndarray) -> np.ndarray:
            """Counts the detections ``rows``, bool (D,), above each of the confidences: int64 (C, S)."""
            exceeding = np.bincount(cell[rows], minlength=classes * (steps + 1)).reshape(classes, steps + 1)
            # A score is above confidence s if it exceeds s + 1 of them or more: sums from the last column to the left.
            descending = exceeding[:, 1:][:, ::-1]
            return descending.cumsum(1)[:, ::-1]

        tp = counts_above(outcomes.true_positive[:, ALL_SIZES, IOU_50])
        detections = tp + counts_above(outcomes.false_positive[:, ALL_SIZES, IOU_50])
        precision = tp / np.maximum(detections, 1)
        # No detection is left above the best score of a class: keep the last measured value.
        last_measured = np.maximum((detections > 0).sum(1) - 1, 0)
        precision = np.take_along_axis(precision, np.minimum(np.arange(steps), last_measured[:, None]), axis=1)
        recall = tp / np.maximum(targets, 1)[:, None]
        precision[targets == 0] = np.nan
        recall[targets == 0] = np.nan
        f1 = f1_score(precision, recall)
        return cls(precision, recall, f1, _middle_of_best(nanmean(f1, axis=0)))

    @property
    def threshold(self) -> float | None:
        """The confidence with the best mean F1; None if no confidence gives a true positive."""
        return float(CONFIDENCES[self.best]) if nanmean(self.f1[:, self.best]) > 0 else None


def _middle_of_best(mean_f1: np.ndarray) -> int:
    """Returns where ``mean_f1``, float64 (S,), is largest; 0 if all are nan.

    This is the middle of the first run of equally good confidences, so that the threshold keeps a distance from the
    scores on both sides, which rounding may change.
    """
    if np.isnan(mean_f1).all():
        return 0
    first = int(np.argmax(mean_f1))
    is_lower = mean_f1[first:] < mean_f1[first]
    length = int(np.argmax(is_lower)) if is_lower.any() else len(is_lower)
    return first + (length - 1) // 2


class Metric(NamedTuple):
    """A metric, its names, and its chart in report.html."""

    name: str  # in results.csv and TensorBoard after "metrics/", and in lower case in results.json
    column: str  # in the printed table and classes.csv
    title: str  # title of its chart; also its name in messages
    axis: str  # label of the chart's y axis
    # Maps curves and `interpolated_precision` (C, A, T, R) to float64 (C, ...). The mean for a class is its metric; the
    # mean of all values is the overall metric.
    values: Callable[[ConfidenceCurves, np.ndarray], np.ndarray]


def _precision(curves: ConfidenceCurves, _: np.ndarray) -> np.ndarray:
    return curves.precision[:, curves.best]


def _recall(curves: ConfidenceCurves, _: np.ndarray) -> np.ndarray:
    return curves.recall[:, curves.best]


def _f1(curves: ConfidenceCurves, _: np.ndarray) -> np.ndarray:
    return curves.f1[:, curves.best]


def _ap50(_: ConfidenceCurves, interpolated: np.ndarray) -> np.ndarray:
    return interpolated[:, ALL_SIZES, IOU_50]


def _ap75(_: ConfidenceCurves, interpolated: np.ndarray) -> np.ndarray:
    return interpolated[:, ALL_SIZES, IOU_75]


def _ap(_: ConfidenceCurves, interpolated: np.ndarray) -> np.ndarray:
    return interpolated[:, ALL_SIZES]


METRICS = (
    Metric("precision", "P", "precision", "precision at IoU 0.5", _precision),
    Metric("recall", "R", "recall", "recall at IoU 0.5", _recall),
    Metric("f1", "F1", "F1", "F1 at IoU 0.5", _f1),
    Metric("AP50", "AP50", "AP50", "AP at IoU 0.5", _ap50),
    Metric("AP75", "AP75", "AP75", "AP at IoU 0.75", _ap75),
    Metric("AP", "AP", "AP", "AP at IoU 0.50:0.95", _ap),
)


@dataclass(frozen=True)
class Fitness:
    """The number that decides which epoch is the best: a metric of all classes, or of one."""

    metric: str  # a name of `METRICS`
    name: str  # for display: the metric and the class
    class_index: int | None = None  # None: all classes

    @classmethod
    def parse(cls, value: str, names: Sequence[str]) -> Fitness:
        """Parses ``--fitness``: a metric in any case, ``METRIC:CLASS``, or the name of a class, which means its AP.
        After ``METRIC:``, a class is given by name or number. Raises UserError for a metric or a class that does not
        exist."""
        titles = {metric.name: metric.title for metric in METRICS}
        metrics = {name.lower(): name for name in titles}
        metric = metrics.get(value.lower())
        if metric is not None:
            return cls(metric, titles[metric])
        prefix, _, class_name = value.partition(":")
        if class_name and value not in names:
            metric = metrics.get(prefix.lower())
        if metric is None:
            if value not in names:
                hint = suggestion(value, [*titles.values(), *names])
                known = ", ".join(titles.values())
                raise UserError(f"--fitness {value}: neither a metric ({known}) nor a class of the data set{hint}")
            metric = "AP"
            class_name = value
        (index,) = class_numbers([class_name], dict(enumerate(names)), "the data set", flag="--fitness")
        return cls(metric, f"{titles[metric]}:{names[index]}", index)

    @property
    def column(self) -> str:
        """Name of the column in results.csv."""
        return f"metrics/{self.metric if self.class_index is None else self.name}"

    def score_of(self, result: EvalResult) -> float:
        """Returns the fitness of ``result``; nan if there is nothing to score."""
        if self.class_index is None:
            return result.metrics[self.metric]
        return float(result.class_metrics[self.metric][self.class_index])

    def check_objects(self, truth: GroundTruth) -> None:
        """Raises UserError if the validation split has no object of the class, so that no epoch could be the best."""
        if self.class_index is not None and not (~truth.crowd & (truth.classes == self.class_index)).any():
            raise UserError(f"--fitness {self.name}: the validation images have no object of this class to score")


def score_detections(
    gt: GroundTruth,
    table: DetectionTable,
    num_classes: int,
    *,
    shown: DetectionTable | None = None,
    plain_confidence: float | None = None,
) -> EvalResult:
    """Scores detections against labels.

    AP equals COCO's evaluation of boxes to the last digit: 10 IoU thresholds, 101 recall points, the best
    ``gt.max_det`` detections of each class in each image, crowd as ignore regions, size ranges by ``area_px``. Equal
    scores rank by the order of ``gt.image_ids``, then of the table, as they would from a predictions file.

    Precision, recall and F1 are computed at IoU 0.5, the confusion matrix at `CONFUSION_IOU`, all above the confidence
    with the best mean F1. Above the best score of a class, precision keeps its value at this score. Classes without
    objects are nan, and the means leave them out.

    Args:
        table: detections whose AP is computed.
        shown: detections as detect.py finds them, for precision, recall, F1 and the confusion matrix; None: ``table``.
        plain_confidence: `best_threshold` of ``shown`` without box voting, which the result holds; None: unknown.
    """
    precision, scored_curves = _precision_and_curves(gt, table, num_classes)
    curves = scored_curves if shown is None else _confidence_curves(gt, shown, num_classes)
    confusion_confidence = DEFAULT_CONFIDENCE if curves.threshold is None else curves.threshold
    confused = table if shown is None else shown
    values = {m.name: m.values(curves, precision) for m in METRICS}
    return EvalResult(
        metrics={m.name: float(nanmean(values[m.name])) for m in METRICS},
        class_metrics={name: nanmean(v, axis=tuple(range(1, v.ndim))) for name, v in values.items()},
        best_confidence=float(CONFIDENCES[curves.best]),
        ap_small=float(nanmean(precision[:, SMALL])),
        ap_medium=float(nanmean(precision[:, MEDIUM])),
        ap_large=float(nanmean(precision[:, LARGE])),
        class_targets=gt.boxes_per_class(num_classes),
        confusion=confusion_matrix(gt, confused, num_classes, confusion_confidence),
        confusion_confidence=confusion_confidence,
        curve_confidence=CONFIDENCES.copy(),
        curve_precision=curves.precision,
        curve_recall=curves.recall,
        pr_recall=RECALL_POINTS.copy(),
        pr_precision=precision[:, ALL_SIZES, IOU_50].copy(),
        num_images=gt.num_images,
        scored_confidence=scored_curves.threshold,
        plain_confidence=plain_confidence,
    )


def best_threshold(gt: GroundTruth, table: DetectionTable, num_classes: int) -> float | None:
    """Finds the confidence above which the detections in ``table`` have the best mean F1; None if none is correct."""
    return _confidence_curves(gt, table, num_classes).threshold


# The matches of a large split take gigabytes. The next two functions return without them, so that the matches of only
# one of a validation's selections are in memory at a time (`Evaluator.run`).


def _precision_and_curves(
    gt: GroundTruth, table: DetectionTable, num_classes: int
) -> tuple[np.ndarray, ConfidenceCurves]:
    """Computes `interpolated_precision` and the curves of detections."""
    matches = match_detections(gt, table, num_classes)
    outcomes = sort_by_class(matches)
    targets = matches.targets()
    return interpolated_precision(outcomes, targets), ConfidenceCurves.of(outcomes, targets[:, ALL_SIZES])


def _confidence_curves(gt: GroundTruth, table: DetectionTable, num_classes: int) -> ConfidenceCurves:
    """Computes the curves of detections."""
    matches = match_detections(gt, table, num_classes)
    return ConfidenceCurves.of(sort_by_class(matches), matches.targets()[:, ALL_SIZES])


def interpolated_precision(outcomes: DetectionOutcomes, targets: np.ndarray) -> np.ndarray:
    """Computes the largest precision at or beyond each recall point: float64 (C, A, T, R); 0 where the recall is never
    reached, nan where there is no object. ``targets``: int64 (C, A), number of objects that count."""
    classes, areas = targets.shape
    result = np.full((classes, areas, outcomes.true_positive.shape[-1], RECALL_POINTS.size), np.nan)
    result[targets > 0] = 0.0
    for c in np.flatnonzero((targets[:, ALL_SIZES] > 0) & (np.diff(outcomes.class_offsets) > 0)):
        rows = slice(outcomes.class_offsets[c], outcomes.class_offsets[c + 1])
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


def confusion_matrix(gt: GroundTruth, table: DetectionTable, num_classes: int, confidence: float) -> np.ndarray:
    """Counts detections and objects by predicted and true class.

    Classes do not matter to matching: larger IoU first, then larger score. The sum of a column is the number of objects
    of that class, without crowd regions. The sum of a row is the number of detections of that class above
    ``confidence``, except detections that match no object and lie in a crowd region of their class.

    Returns int64 (C + 1, C + 1): rows predicted, columns true, the last of each is background.
    """
    confident = table.take(table.scores > confidence)
    confident = confident.take(np.argsort(confident.image_index, kind="stable"))
    objects = Objects(gt.image_of_box, gt.boxes_xywh_px, gt.crowd)
    pairs = overlapping_pairs(confident.image_index, confident.boxes_xyxy_px, objects, CONFUSION_IOU)
    is_crowd = gt.crowd[pairs.target]
    pairs_with_objects = pairs.take(~is_crowd)
    preference = confident.scores[pairs_with_objects.detection]
    target = match_by_overlap(pairs_with_objects, preference, len(confident.scores), len(gt.classes))  # -1: none
    is_matched = target >= 0
    missed = ~gt.crowd
    missed[target[is_matched]] = False
    # A detection that matches no object is not counted in a crowd region of its class.
    crowd_pairs = pairs.take(is_crowd)
    is_same_class = confident.classes[crowd_pairs.detection] == gt.classes[crowd_pairs.target]
    is_counted = np.ones(len(confident.scores), dtype=bool)
    is_counted[crowd_pairs.detection[is_same_class]] = False
    is_counted |= is_matched
    background = num_classes
    true_class = np.append(gt.classes, background)[target]  # target -1 is the last one
    row = np.concatenate([confident.classes[is_counted], np.full(missed.sum(), background)])
    column = np.concatenate([true_class[is_counted], gt.classes[missed]])
    size = num_classes + 1
    return np.bincount(row * size + column, minlength=size * size).astype(np.int64).reshape(size, size)
