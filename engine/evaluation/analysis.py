"""Measures that val.py reports besides the metrics: kinds of errors, AP by object size, and how exactly AP is known.

The kinds of errors are TIDE's (Bolya et al., ECCV 2020), at IoU 0.5. Each false positive has one kind. An object that
no detection matches is missed unless a false positive explains it. The cost of a kind is the rise of AP if an oracle
fixes the errors of that kind and no others.

Legend: D detections, M objects, C classes, F false positives, A sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import (
    ALL_SIZES,
    IOU_50,
    IOU_75,
    DetectionOutcomes,
    Matches,
    Objects,
    Pairs,
    overlapping_pairs,
    sort_by_class,
)
from engine.evaluation.metrics import interpolated_precision, nanmean

KINDS = ("class", "location", "both", "duplicate", "background", "missed")
CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED = range(6)
CORRECT, IN_CROWD = -1, -2  # outcomes of detections besides the kinds
FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1  # TIDE's t_f and t_b
JACKKNIFE_GROUPS = 20
SIZES = ("all", "small", "medium", "large")  # names of `AREA_RANGES`


class SizeScores(NamedTuple):
    """Scores of each class and size; nan where there is no object."""

    targets: np.ndarray  # int64 (C, A)
    ap: np.ndarray  # float64 (C, A) IoU 0.50:0.95
    ap50: np.ndarray  # float64 (C, A)
    ap75: np.ndarray  # float64 (C, A)
    recall: np.ndarray  # float64 (C, A) COCO's AR: recall of all detections that count, mean over IoU 0.50:0.95


def score_sizes(matches: Matches) -> SizeScores:
    """Computes COCO's scores for its four sizes. Means over the classes that have objects equal pycocotools'."""
    outcomes = sort_by_class(matches)
    targets = matches.targets()
    precision = interpolated_precision(outcomes, targets)
    hits = np.stack([outcomes.true_positive[low:high].sum(0) for low, high in pairwise(outcomes.class_offsets)])
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


class ErrorSplit(NamedTuple):
    """Errors of each kind and their costs; the 6 columns are `KINDS`. Means leave out classes without objects."""

    ap: float  # at IoU 0.5
    counts: np.ndarray  # int64 (C, 6) by class of the detection; missed ones by class of the object
    class_cost: np.ndarray  # float64 (C, 6) rise of AP; nan where there is no object
    cost: np.ndarray  # float64 (6,) mean over the classes
    false_positive_cost: float  # rise of AP without any false positive
    false_negative_cost: float  # rise of AP without the objects that no detection matches


class Errors(NamedTuple):
    """Outcome of each ranked detection and each object of `Matches`."""

    outcome: np.ndarray  # int64 (D,) `CORRECT`, `IN_CROWD` (a crowd region), or the kind of a false positive
    target: np.ndarray  # int64 (D,) the object that an error of CLASS or LOCATION is about, else -1
    detected: np.ndarray  # bool (M,) objects that a true positive matches
    missed: np.ndarray  # bool (M,) objects that nothing matches and no error explains


def find_errors(matches: Matches) -> Errors:
    """Finds the kind of each false positive, and the missed objects.

    A false positive has the first of these kinds that applies:

    - LOCATION: its best IoU with objects of its class is in [0.1, 0.5).
    - CLASS: it has an IoU of at least 0.5 with an object of another class.
    - DUPLICATE: it has an IoU of at least 0.5 with an object of its class, which a better detection matched.
    - BOTH: it has an IoU of at least 0.1 with an object of another class.
    - BACKGROUND: any other.

    An unmatched object is MISSED unless an error of LOCATION or CLASS is about it.
    """
    assignment = matches.assignment
    is_object = ~matches.objects.crowd
    matched = assignment.matched[:, ALL_SIZES, IOU_50]
    ignored = assignment.ignored[:, ALL_SIZES, IOU_50]
    outcome = np.full(matches.ranked.scores.size, BACKGROUND)
    outcome[assignment.overlapping[matched]] = np.where(ignored[matched], IN_CROWD, CORRECT)
    false = np.flatnonzero(outcome == BACKGROUND)
    target = np.full(outcome.size, -1)
    outcome[false], target[false] = _classify(matches, false)
    detected = np.zeros(is_object.size, dtype=bool)
    detected[assignment.target[matched & ~ignored]] = True
    missed = is_object & ~detected
    missed[target[target >= 0]] = False
    return Errors(outcome, target, detected, missed)


def split_errors(matches: Matches) -> ErrorSplit:
    """Counts the errors of each kind (`find_errors`) among the detections that count, and measures the cost of each.

    An oracle fixes one kind at a time. Of the errors of CLASS, or of LOCATION, about an unmatched object, the one with
    the highest score becomes a true positive with its own score, and the others of that kind are removed. Errors of
    the other kinds are removed. Missed objects are no longer counted. (If errors of CLASS and of LOCATION are about
    one object, the authors' tool fixes only the better of the two.)
    """
    errors = find_errors(matches)
    current = _Counted(
        classes=matches.ranked.classes,
        scores=matches.ranked.scores,
        by_score=np.argsort(-matches.ranked.scores, kind="stable"),
        true_positive=errors.outcome == CORRECT,
        counted=errors.outcome != IN_CROWD,
        targets=_class_counts(matches, ~matches.objects.crowd),
    )
    ap = current.ap()
    class_cost = np.stack([_cost(ap, _fixed(matches, errors, current, kind)) for kind in range(len(KINDS))], 1)
    no_false_positives = replace(current, counted=current.true_positive)
    no_false_negatives = replace(current, targets=_class_counts(matches, errors.detected))
    return ErrorSplit(
        ap=float(nanmean(ap)),
        counts=_error_counts(matches, errors),
        class_cost=class_cost,
        cost=nanmean(class_cost, axis=0),
        false_positive_cost=float(nanmean(_cost(ap, no_false_positives))),
        false_negative_cost=float(nanmean(_cost(ap, no_false_negatives))),
    )


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """Detections with known outcomes, and the objects that count."""

    classes: np.ndarray  # int64 (D,)
    scores: np.ndarray  # float64 (D,)
    by_score: np.ndarray  # int64 (D,) rows, the best first; sorted once, because this takes most of the time
    true_positive: np.ndarray  # bool (D,)
    counted: np.ndarray  # bool (D,) the others are neither true nor false positives
    targets: np.ndarray  # int64 (C,) number of objects

    def ap(self) -> np.ndarray:
        """Returns AP (C,); nan where there is no object."""
        num_classes = self.targets.size
        rows = self.by_score[self.counted[self.by_score]]
        short_classes = self.classes[rows].astype(np.min_scalar_type(num_classes))  # NumPy sorts 16 bits in linear time
        rows = rows[np.argsort(short_classes, kind="stable")]
        classes = self.classes[rows]
        true_positive = self.true_positive[rows, None, None]  # `ALL_SIZES` and `IOU_50` only
        offsets = np.searchsorted(classes, np.arange(num_classes + 1))
        outcomes = DetectionOutcomes(offsets, self.scores[rows], classes, true_positive, ~true_positive)
        return interpolated_precision(outcomes, self.targets[:, None])[:, ALL_SIZES, IOU_50].mean(-1)


def _cost(ap: np.ndarray, fixed: _Counted) -> np.ndarray:
    """Returns the rise of AP (C,) from ``ap`` (C,) when errors are fixed."""
    fixed_ap = fixed.ap()
    return np.where(np.isnan(fixed_ap), ap, fixed_ap) - ap  # a class whose objects are all missed stays at AP 0


def _fixed(matches: Matches, errors: Errors, current: _Counted, kind: int) -> _Counted:
    """Fixes all errors of a kind, as `split_errors` describes."""
    counted = current.counted & (errors.outcome != kind)
    if kind == MISSED:
        return replace(current, counted=counted, targets=current.targets - _class_counts(matches, errors.missed))
    if kind not in (CLASS, LOCATION):
        return replace(current, counted=counted)
    classes = current.classes.copy()
    true_positive = current.true_positive.copy()
    rows = _best_on_each(errors, kind, current.scores)
    classes[rows] = matches.object_classes[errors.target[rows]]
    true_positive[rows] = True
    counted[rows] = True
    return replace(current, counted=counted, classes=classes, true_positive=true_positive)


def _class_counts(matches: Matches, objects: np.ndarray) -> np.ndarray:
    """Counts chosen ``objects``, bool (M,), by class: int64 (C,)."""
    return np.bincount(matches.object_classes[objects], minlength=matches.num_classes)


def _error_counts(matches: Matches, errors: Errors) -> np.ndarray:
    """Counts errors by class and kind: int64 (C, 6), as in `ErrorSplit`."""
    kinds = len(KINDS)
    is_false = errors.outcome >= 0
    false_positives = matches.ranked.classes[is_false] * kinds + errors.outcome[is_false]
    missed = matches.object_classes[errors.missed] * kinds + MISSED
    cells = np.concatenate([false_positives, missed])
    counts = np.bincount(cells, minlength=matches.num_classes * kinds)
    return counts.reshape(matches.num_classes, kinds).astype(np.int64)


def _classify(matches: Matches, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kinds of the false positives ``rows`` and their objects, as in `Errors`: int64 (F,) each."""
    classes = matches.num_classes
    ranked = matches.ranked
    objects = matches.objects
    not_crowd = np.flatnonzero(~objects.crowd)
    by_image = Objects(objects.group[not_crowd] // classes, objects.boxes_xywh[not_crowd], objects.crowd[not_crowd])
    pairs = overlapping_pairs(ranked.group[rows] // classes, ranked.boxes_xyxy[rows], by_image, BACKGROUND_IOU)
    pairs = pairs._replace(target=not_crowd[pairs.target])
    is_same = ranked.classes[rows][pairs.detection] == matches.object_classes[pairs.target]
    same, same_target = _best_of_each(pairs.take(is_same), rows.size)
    other, other_target = _best_of_each(pairs.take(~is_same), rows.size)
    kind = np.select(
        [
            (same >= BACKGROUND_IOU) & (same < FOREGROUND_IOU),
            other >= FOREGROUND_IOU,
            same >= FOREGROUND_IOU,
            other >= BACKGROUND_IOU,
        ],
        [LOCATION, CLASS, DUPLICATE, BOTH],
        BACKGROUND,
    )
    return kind, np.select([kind == LOCATION, kind == CLASS], [same_target, other_target], -1)


def _best_of_each(pairs: Pairs, detections: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest overlap of each detection, and its object, the first of equal ones; 0 and -1 if there is
    none."""
    pairs = pairs.take(np.lexsort((-pairs.target, pairs.overlap)))  # the largest is written last
    best = np.zeros(detections)
    target = np.full(detections, -1)
    best[pairs.detection] = pairs.overlap
    target[pairs.detection] = pairs.target
    return best, target


def _best_on_each(errors: Errors, kind: int, scores: np.ndarray) -> np.ndarray:
    """Returns for each unmatched object the error of a kind about it with the highest score: rows of the detections."""
    row = np.flatnonzero(errors.outcome == kind)
    row = row[~errors.detected[errors.target[row]]]
    row = row[np.lexsort((row, -scores[row], errors.target[row]))]
    return row[np.unique(errors.target[row], return_index=True)[1]]


def confused_pairs(confusion: np.ndarray) -> list[tuple[int, int, int]]:
    """Lists pairs of classes that are confused, the most frequent first: count of objects, predicted, true class."""
    pairs = [(int(confusion[p, t]), int(p), int(t)) for p, t in np.argwhere(confusion[:-1, :-1]) if p != t]
    return sorted(pairs, key=lambda pair: (-pair[0], *pair[1:]))


def ap_error(matches: Matches) -> float:
    """Estimates the standard error of AP (IoU 0.50:0.95) as a measure of all images of this kind, by the jackknife:
    the AP without each of `JACKKNIFE_GROUPS` groups of images (Tukey 1958). nan with fewer than 10 images with
    objects."""
    classes = matches.num_classes
    outcomes = sort_by_class(matches)
    image = matches.ranked.group[matches.by_class] // classes
    is_object = ~matches.ignored[:, ALL_SIZES]
    object_image = matches.objects.group[is_object] // classes
    object_class = matches.object_classes[is_object]
    images, object_image = np.unique(object_image, return_inverse=True)
    if len(images) < 10:
        return float("nan")
    groups = min(JACKKNIFE_GROUPS, len(images))
    group = np.searchsorted(images, image) % groups
    ap = []
    for left_out in range(groups):
        rows = group != left_out
        kept = DetectionOutcomes(
            class_offsets=np.searchsorted(outcomes.classes[rows], np.arange(classes + 1)),
            scores=outcomes.scores[rows],
            classes=outcomes.classes[rows],
            true_positive=outcomes.true_positive[rows, :1],  # `ALL_SIZES`
            false_positive=outcomes.false_positive[rows, :1],
        )
        targets = np.bincount(object_class[object_image % groups != left_out], minlength=classes)
        ap.append(float(nanmean(interpolated_precision(kept, targets[:, None]))))
    return float(np.sqrt((groups - 1) * np.var(ap)))
