"""Average precision as COCO defines it, equal to pycocotools' on the same boxes; precision, recall and F1 curves.

Legend: D detections, M objects, C classes, A area ranges, T IoU thresholds, R recall points, S confidences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.confusion import confusion_matrix
from utils.matching import AREA_RANGES, IOU_THRESHOLDS, Assignment, Objects, assign_coco, position_in_run
from utils.structures import DetectionTable, EvalResult, GroundTruth

RECALL_POINTS = np.linspace(0.0, 1.0, 101)
CONFIDENCES = np.linspace(0.0, 1.0, 1000)
_SPACING = np.spacing(1)  # COCO adds it to the count of detections


class _Ranked(NamedTuple):
    """Detections that count: grouped by (image, class), best first within a group, at most ``max_det`` of each."""

    group: np.ndarray  # int64 (D,) ascending
    boxes_xyxy: np.ndarray  # float64 (D, 4)
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)


class _Verdicts(NamedTuple):
    """Every detection, by class and then by falling score, with what became of it."""

    class_offsets: np.ndarray  # int64 (C + 1,)
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)
    wrong_if_alone: np.ndarray  # bool (D, A): overlaps nothing, and its size is in the range
    contender: np.ndarray  # int64 (N,) rows that overlap something, ascending
    right: np.ndarray  # bool (N, A, T)
    wrong: np.ndarray  # bool (N, A, T)


def score_detections(gt: GroundTruth, table: DetectionTable, num_classes: int, *, max_det: int = 100) -> EvalResult:
    """Scores detections against labels.

    AP is that of COCO's evaluation of boxes to the last place: 10 IoU thresholds, 101 recall points, the best
    ``max_det`` detections of each class in each image, crowd as ignore regions, size ranges by ``area_px``. Equal
    scores rank by the order of ``gt.image_ids``, then of the table, as they would from a predictions file.

    Precision, recall and F1 are at IoU 0.5, at the one confidence with the best mean F1. Above its best score a
    class keeps the precision of that score. Classes without objects are nan and left out of the means.
    """
    _check_classes(gt.classes, num_classes, "labels")
    _check_classes(table.classes, num_classes, "detections")
    rank_of_image = _image_ranks(gt.image_ids)
    ranked = _rank_detections(table, rank_of_image, num_classes, max_det)
    gt_image = rank_of_image[np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))]
    gt_group = gt_image * num_classes + gt.classes
    order = np.argsort(gt_group, kind="stable")
    objects = Objects(gt_group[order], gt.boxes_xywh_px[order], gt.crowd[order])
    ignored = objects.crowd[:, None] | _out_of_range(gt.area_px[order])
    assignment = assign_coco(ranked.group, ranked.boxes_xyxy, objects, ignored)
    verdicts = _sort_by_class(ranked, assignment, num_classes)
    targets = np.zeros((num_classes, len(AREA_RANGES)), dtype=np.int64)
    np.add.at(targets, gt.classes[order], ~ignored)
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


def _check_classes(classes: np.ndarray, num_classes: int, what: str) -> None:
    if classes.size and not (classes.min() >= 0 and classes.max() < num_classes):
        raise ValueError(f"class ids of the {what} span {classes.min()}..{classes.max()}, want 0..{num_classes - 1}")


def _image_ranks(image_ids: tuple[int | str, ...]) -> np.ndarray:
    """Place of each image in the order of ids, numbers before names: int64 (N,)."""
    order = sorted(range(len(image_ids)), key=lambda i: (isinstance(image_ids[i], str), image_ids[i]))
    ranks = np.empty(len(image_ids), dtype=np.int64)
    ranks[order] = np.arange(len(image_ids))
    return ranks


def _out_of_range(area: np.ndarray) -> np.ndarray:
    """bool (..., A)."""
    return (area[..., None] < AREA_RANGES[:, 0]) | (area[..., None] > AREA_RANGES[:, 1])


def _rank_detections(table: DetectionTable, rank_of_image: np.ndarray, num_classes: int, max_det: int) -> _Ranked:
    group = rank_of_image[table.image_index] * num_classes + table.classes
    order = np.lexsort((-table.scores, group))  # stable: equal scores in the order of the table
    order = order[position_in_run(group[order]) < max_det]
    return _Ranked(group[order], table.boxes_xyxy_px[order], table.scores[order], table.classes[order])


def _sort_by_class(ranked: _Ranked, assignment: Assignment, num_classes: int) -> _Verdicts:
    order = np.lexsort((-ranked.scores, ranked.classes))  # stable: equal scores in the order of the images
    is_contender = np.zeros(order.size, dtype=bool)
    is_contender[assignment.contender] = True
    where = np.empty(order.size, dtype=np.int64)
    where[assignment.contender] = np.arange(assignment.contender.size)
    contender = np.flatnonzero(is_contender[order])
    verdict = where[order[contender]]
    x1, y1, x2, y2 = ranked.boxes_xyxy[order].T
    out_of_range = _out_of_range((x2 - x1) * (y2 - y1))
    matched, ignored = assignment.matched[verdict], assignment.ignored[verdict]
    return _Verdicts(
        class_offsets=np.searchsorted(ranked.classes[order], np.arange(num_classes + 1)),
        scores=ranked.scores[order],
        classes=ranked.classes[order],
        wrong_if_alone=~out_of_range & ~is_contender[order, None],
        contender=contender,
        right=matched & ~ignored,
        wrong=~matched & ~out_of_range[contender, :, None],
    )


def interpolated_precision(verdicts: _Verdicts, targets: np.ndarray) -> np.ndarray:
    """The largest precision at or beyond each recall point.

    Args:
        verdicts: sorted detections.
        targets: int64 (C, A) objects that count.

    Returns:
        float64 (C, A, T, R); 0 where the recall is never reached, nan where there is no object.
    """
    classes, areas = targets.shape
    result = np.full((classes, areas, IOU_THRESHOLDS.size, RECALL_POINTS.size), np.nan)
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


def _confidence_curves(verdicts: _Verdicts, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall (C, S) at IoU 0.5 of the detections that score at least each confidence of the grid."""
    classes, steps = targets.size, CONFIDENCES.size
    right = np.zeros(verdicts.scores.size, dtype=bool)
    wrong = verdicts.wrong_if_alone[:, 0].copy()
    right[verdicts.contender] = verdicts.right[:, 0, 0]
    wrong[verdicts.contender] = verdicts.wrong[:, 0, 0]
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


def _mean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
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
    by_class = _mean(precision[:, 0], axis=(1, 2))
    by_class_50, by_class_75 = (_mean(precision[:, 0, t], axis=1) for t in (0, 5))
    both = curve_precision + curve_recall
    curve_f1 = 2 * curve_precision * curve_recall / np.where(both > 0, both, 1.0)
    mean_f1 = _mean(curve_f1, axis=0)
    best = 0 if np.isnan(mean_f1).all() else int(np.argmax(mean_f1))
    return EvalResult(
        precision=float(_mean(curve_precision[:, best])),
        recall=float(_mean(curve_recall[:, best])),
        f1=float(mean_f1[best]),
        best_confidence=float(CONFIDENCES[best]),
        ap=float(_mean(precision[:, 0])),
        ap50=float(_mean(precision[:, 0, 0])),
        ap75=float(_mean(precision[:, 0, 5])),
        ap_small=float(_mean(precision[:, 1])),
        ap_medium=float(_mean(precision[:, 2])),
        ap_large=float(_mean(precision[:, 3])),
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
