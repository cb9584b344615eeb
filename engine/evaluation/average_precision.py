"""Average precision as COCO defines it, equal to pycocotools' on the same boxes; precision, recall and F1 curves; the
confusion matrix.

Legend: D detections, M objects, C classes, A area ranges, T IoU thresholds, R recall points, S confidences.
"""

from __future__ import annotations

import numpy as np

from engine.evaluation.matching import Objects, Pairs, match_by_overlap, overlapping_pairs
from engine.evaluation.outcomes import Verdicts, judge, sort_by_class
from utils.structures import DetectionTable, EvalResult, GroundTruth

CONFIDENCE = 0.25
IOU = 0.45


def confusion_matrix(
    gt: GroundTruth,
    table: DetectionTable,
    num_classes: int,
    *,
    confidence: float = CONFIDENCE,
    iou: float = IOU,
) -> np.ndarray:
    """Counts by predicted and true class, matched without regard to class, larger IoU first, then larger score.

    The sum of a column is the number of objects of that class (crowd left out); the sum of a row is the number of
    detections of that class at or above ``confidence``, less those that match no object and lie in a crowd region of
    their class, which are neither right nor wrong.

    Returns:
        int64 (C + 1, C + 1): rows predicted, columns true, the last of each is background.
    """
    rows = np.flatnonzero(table.scores >= confidence)
    rows = rows[np.argsort(table.image_index[rows], kind="stable")]
    image, boxes = table.image_index[rows], table.boxes_xyxy_px[rows]
    predicted, scores = table.classes[rows], table.scores[rows]
    gt_image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    plain, crowd = ~gt.crowd, gt.crowd

    pairs = _all_pairs(image, boxes, Objects(gt_image[plain], gt.boxes_xywh_px[plain], crowd[plain]), iou)
    match = match_by_overlap(pairs, scores[pairs.detection], rows.size, int(plain.sum()))

    pairs = _all_pairs(image, boxes, Objects(gt_image[crowd], gt.boxes_xywh_px[crowd], crowd[crowd]), iou)
    same_class = predicted[pairs.detection] == gt.classes[crowd][pairs.target]
    in_crowd = np.zeros(rows.size, dtype=bool)
    in_crowd[pairs.detection[same_class]] = True

    hit = match >= 0
    true = gt.classes[plain]
    missed = np.ones(true.size, dtype=bool)
    missed[match[hit]] = False
    counted = hit | ~in_crowd
    row = np.r_[predicted[counted], np.full(missed.sum(), num_classes)]
    column = np.r_[np.where(hit, np.r_[true, num_classes][match], num_classes)[counted], true[missed]]
    size = num_classes + 1
    return np.bincount(row * size + column, minlength=size * size).astype(np.int64).reshape(size, size)


def _all_pairs(image: np.ndarray, boxes: np.ndarray, objects: Objects, iou: float) -> Pairs:
    chunks = list(overlapping_pairs(image, boxes, objects, iou))
    if not chunks:
        nothing = np.zeros(0, dtype=np.int64)
        return Pairs(nothing, nothing, np.zeros(0))
    return Pairs(*(np.concatenate(parts) for parts in zip(*chunks)))


RECALL_POINTS = np.linspace(0.0, 1.0, 101)
CONFIDENCES = np.linspace(0.0, 1.0, 1000)
_SPACING = np.spacing(1)  # COCO adds it to the count of detections


def score_detections(gt: GroundTruth, table: DetectionTable, num_classes: int, *, max_det: int = 100) -> EvalResult:
    """Scores detections against labels.

    AP is that of COCO's evaluation of boxes to the last place: 10 IoU thresholds, 101 recall points, the best
    ``max_det`` detections of each class in each image, crowd as ignore regions, size ranges by ``area_px``. Equal
    scores rank by the order of ``gt.image_ids``, then of the table, as they would from a predictions file.

    Precision, recall and F1 are at IoU 0.5, at the one confidence with the best mean F1. Above its best score a
    class keeps the precision of that score. Classes without objects are nan and left out of the means.
    """
    judgement = judge(gt, table, num_classes, max_det=max_det)
    verdicts, targets = sort_by_class(judgement), judgement.targets()
    precision = interpolated_precision(verdicts, targets)
    curve_precision, curve_recall = _confidence_curves(verdicts, targets[:, 0])
    return _summarise(
        precision,
        curve_precision,
        curve_recall,
        class_targets=np.bincount(gt.classes[~gt.crowd], minlength=num_classes).astype(np.int64),
        confusion=confusion_matrix(gt, table, num_classes),
        num_images=gt.num_images,
    )


def interpolated_precision(verdicts: Verdicts, targets: np.ndarray) -> np.ndarray:
    """The largest precision at or beyond each recall point.

    Args:
        verdicts: sorted detections.
        targets: int64 (C, A) objects that count.

    Returns:
        float64 (C, A, T, R); 0 where the recall is never reached, nan where there is no object.
    """
    classes, areas = targets.shape
    result = np.full((classes, areas, verdicts.right.shape[-1], RECALL_POINTS.size), np.nan)
    result[targets > 0] = 0.0
    cuts = np.searchsorted(verdicts.contender, verdicts.class_offsets)
    for c in np.flatnonzero((targets[:, 0] > 0) & (np.diff(cuts) > 0)):
        # Only contenders can be right, so the envelope and the recall need no other rows; those enter as counts.
        rows = slice(verdicts.class_offsets[c], verdicts.class_offsets[c + 1])
        within = slice(cuts[c], cuts[c + 1])
        alone = np.cumsum(verdicts.wrong_if_alone[rows], axis=0)[verdicts.contender[within] - rows.start]
        right = np.cumsum(verdicts.right[within], axis=0)
        wrong = np.cumsum(verdicts.wrong[within], axis=0) + alone[:, :, None]
        precision = right / (wrong + right + _SPACING)
        envelope = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
        for a in np.flatnonzero(targets[c]):
            result[c, a] = _at_recall_points(right[:, a].T, envelope[:, a].T, int(targets[c, a]))
    return result


def _at_recall_points(right: np.ndarray, envelope: np.ndarray, targets: int) -> np.ndarray:
    """``envelope`` (T, n) at the first place where the recall ``right / targets`` is enough: (T, R), 0 if nowhere."""
    rows, length = right.shape
    # The recall at a count is compared as COCO does, in floating point; the counts are then searched as integers,
    # all rows in one sorted array.
    wanted = np.searchsorted(np.arange(targets + 1) / targets, RECALL_POINTS)
    shift = np.arange(rows)[:, None] * (targets + 1)
    place = np.searchsorted((right + shift).ravel(), (wanted + shift).ravel()).reshape(rows, -1)
    place -= np.arange(rows)[:, None] * length
    reached = wanted <= right[:, -1:]
    values = np.take_along_axis(envelope, np.minimum(place, length - 1), axis=1)
    return np.where(reached, values, 0.0)


def _confidence_curves(verdicts: Verdicts, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall (C, S) at IoU 0.5 of the detections that score at least each confidence of the grid."""
    classes, steps = targets.size, CONFIDENCES.size
    right, wrong = verdicts.plain()
    last = np.clip(np.searchsorted(CONFIDENCES, verdicts.scores, side="right") - 1, 0, steps - 1)
    cell = verdicts.classes * steps + last

    def counts(rows: np.ndarray) -> np.ndarray:
        histogram = np.bincount(cell[rows], minlength=classes * steps).reshape(classes, steps)
        return histogram[:, ::-1].cumsum(1)[:, ::-1]

    true, false = counts(right), counts(wrong)
    found = true + false
    precision = true / np.maximum(found, 1)
    # Beyond the best score of a class nothing is left to judge: keep the last value that was measured.
    last_measured = np.maximum((found > 0).sum(1) - 1, 0)
    precision = np.take_along_axis(precision, np.minimum(np.arange(steps), last_measured[:, None]), axis=1)
    recall = true / np.maximum(targets, 1)[:, None]
    precision[targets == 0] = np.nan
    recall[targets == 0] = np.nan
    return precision, recall


def mean_known(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Mean of what is not nan; nan, and no warning, where nothing is left."""
    valid = ~np.isnan(values)
    count = valid.sum(axis)
    total = np.where(valid, values, 0.0).sum(axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _summarise(
    precision: np.ndarray,
    curve_precision: np.ndarray,
    curve_recall: np.ndarray,
    *,
    class_targets: np.ndarray,
    confusion: np.ndarray,
    num_images: int,
) -> EvalResult:
    by_class = mean_known(precision[:, 0], axis=(1, 2))
    by_class_50, by_class_75 = (mean_known(precision[:, 0, t], axis=1) for t in (0, 5))
    both = curve_precision + curve_recall
    curve_f1 = 2 * curve_precision * curve_recall / np.where(both > 0, both, 1.0)
    mean_f1 = mean_known(curve_f1, axis=0)
    best = 0 if np.isnan(mean_f1).all() else int(np.argmax(mean_f1))
    return EvalResult(
        precision=float(mean_known(curve_precision[:, best])),
        recall=float(mean_known(curve_recall[:, best])),
        f1=float(mean_f1[best]),
        best_confidence=float(CONFIDENCES[best]),
        ap=float(mean_known(precision[:, 0])),
        ap50=float(mean_known(precision[:, 0, 0])),
        ap75=float(mean_known(precision[:, 0, 5])),
        ap_small=float(mean_known(precision[:, 1])),
        ap_medium=float(mean_known(precision[:, 2])),
        ap_large=float(mean_known(precision[:, 3])),
        class_ap=by_class,
        class_ap50=by_class_50,
        class_ap75=by_class_75,
        class_precision=curve_precision[:, best].copy(),
        class_recall=curve_recall[:, best].copy(),
        class_f1=curve_f1[:, best].copy(),
        class_targets=class_targets,
        confusion=confusion,
        curve_confidence=CONFIDENCES.copy(),
        curve_precision=curve_precision,
        curve_recall=curve_recall,
        pr_recall=RECALL_POINTS.copy(),
        pr_precision=precision[:, 0, 0].copy(),
        num_images=num_images,
    )
