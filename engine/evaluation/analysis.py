"""What val.py measures besides the metrics: kinds of errors, and AP by object size.

Kinds of errors are those of TIDE (Bolya et al., ECCV 2020), at IoU 0.5, and how much AP each costs: each false positive
has one kind of error. An object that no detection matches is missed unless a false positive explains it. The cost of a
kind is the rise of AP if an oracle fixes the errors of that kind and no others.

Legend: D detections, M objects, C classes, F false positives, A sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import (
    IOU_THRESHOLDS,
    Matches,
    Objects,
    known_outcomes,
    overlapping_pairs,
    sort_by_class,
)
from engine.evaluation.metrics import interpolated_precision, mean_known

KINDS = ("class", "location", "both", "duplicate", "background", "missed")
CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED = range(6)
FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1  # TIDE's t_f and t_b
SIZES = ("all", "small", "medium", "large")  # of `AREA_RANGES`


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


class ErrorSplit(NamedTuple):
    """Columns of the second axes are `KINDS`. Classes without objects have no AP; the means leave them out."""

    ap: float  # at IoU 0.5
    counts: np.ndarray  # int64 (C, 6) by class of the detection; missed ones by class of the object
    class_cost: np.ndarray  # float64 (C, 6) rise of AP; nan where there is no object
    cost: np.ndarray  # float64 (6,) mean over the classes
    false_positive_cost: float  # rise of AP without any false positive
    false_negative_cost: float  # rise of AP without the objects that no detection matches


class Errors(NamedTuple):
    """Outcomes of the ranked detections and of the objects of `Matches`, and the false positives."""

    true_positive: np.ndarray  # bool (D,)
    counted: np.ndarray  # bool (D,) False: in a crowd region
    found: np.ndarray  # bool (M,) objects that a true positive matches
    missed: np.ndarray  # bool (M,) objects that nothing matches and no error explains
    row: np.ndarray  # int64 (F,) of the ranked detections
    kind: np.ndarray  # int64 (F,)
    target: np.ndarray  # int64 (F,) the object that an error of CLASS or LOCATION is about, else -1


def find_errors(matches: Matches) -> Errors:
    """The kind of each false positive, and the objects that are missed.

    A false positive is an error of LOCATION if its best IoU with objects of its class is in [0.1, 0.5), else of CLASS
    if it has an IoU of at least 0.5 with an object of another class, else a DUPLICATE if it has that with an object of
    its own class (which a better detection matched), else of BOTH if it has at least 0.1 with an object of another
    class, else of BACKGROUND. Unmatched objects are MISSED unless an error of one of the first two kinds is about them.
    """
    true_positive, counted, matched_target = _outcomes(matches)
    plain = ~matches.objects.crowd
    found, explained = np.zeros(plain.size, dtype=bool), np.zeros(plain.size, dtype=bool)
    found[matched_target[true_positive]] = True
    row = np.flatnonzero(counted & ~true_positive)
    kind, target = _classify(matches, row)
    explained[target[target >= 0]] = True
    return Errors(true_positive, counted, found, plain & ~found & ~explained, row, kind, target)


def split_errors(matches: Matches) -> ErrorSplit:
    """Counts the errors of each kind (`find_errors`) among the detections that count, and measures the cost of each.

    Fixing: of the errors of CLASS, or of LOCATION, about an unmatched object, the one with the highest score becomes
    a true positive with its own score; the others of that kind, and all errors of the other kinds, are left out; missed
    objects are no longer counted. (If errors of CLASS and of LOCATION are about one object, the authors' tool fixes
    only the better of the two.)
    """
    ranked, classes = matches.ranked, matches.num_classes
    errors, plain = find_errors(matches), ~matches.objects.crowd
    true_positive, counted, found, missed = errors[:4]
    object_classes = matches.object_classes
    targets = np.bincount(object_classes[plain], minlength=classes)
    base = _ap(ranked.classes, ranked.scores, true_positive, counted, targets)

    def cost(of_class: np.ndarray, tp: np.ndarray, counted: np.ndarray, targets: np.ndarray) -> np.ndarray:
        fixed = _ap(of_class, ranked.scores, tp, counted, targets)
        return np.where(np.isnan(fixed), base, fixed) - base  # a class whose objects are all missed stays at AP 0

    columns = []
    for kind in range(len(KINDS)):
        of_class, fixed_tp, fixed_counted, remaining = ranked.classes, true_positive.copy(), counted.copy(), targets
        if kind == MISSED:
            remaining = targets - np.bincount(object_classes[missed], minlength=classes)
        else:
            fixed_counted[errors.row[errors.kind == kind]] = False
        if kind in (CLASS, LOCATION):
            row, target = _best_on_each(errors, kind, ranked.scores, found)
            fixed_tp[row] = fixed_counted[row] = True
            of_class = of_class.copy()
            of_class[row] = object_classes[target]
        columns.append(cost(of_class, fixed_tp, fixed_counted, remaining))
    class_cost = np.stack(columns, 1)
    kinds = len(KINDS)
    cell = np.r_[ranked.classes[errors.row] * kinds + errors.kind, object_classes[missed] * kinds + MISSED]
    matched_targets = np.bincount(object_classes[found], minlength=classes)
    return ErrorSplit(
        ap=_mean(base, targets),
        counts=np.bincount(cell, minlength=classes * kinds).reshape(classes, kinds).astype(np.int64),
        class_cost=class_cost,
        cost=np.array([_mean(column, targets) for column in class_cost.T]),
        false_positive_cost=_mean(cost(ranked.classes, true_positive, true_positive, targets), targets),
        false_negative_cost=_mean(cost(ranked.classes, true_positive, counted, matched_targets), targets),
    )


def _outcomes(matches: Matches) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which detections are true positives, and which count at all (not those in a crowd region): bool (D,) each; and
    their objects: int64 (D,), -1 for none."""
    size, assignment = matches.ranked.scores.size, matches.assignment
    true_positive, counted = np.zeros(size, dtype=bool), np.ones(size, dtype=bool)
    target = np.full(size, -1, dtype=np.int64)
    matched, ignored = assignment.matched[:, 0, 0], assignment.ignored[:, 0, 0]
    true_positive[assignment.overlapping] = matched & ~ignored
    counted[assignment.overlapping] = ~(matched & ignored)
    target[assignment.overlapping] = assignment.target
    return true_positive, counted, target


def _classify(matches: Matches, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kinds of the false positives ``rows`` and their objects, as in `Errors`: int64 (F,) each."""
    classes, ranked, objects = matches.num_classes, matches.ranked, matches.objects
    plain = np.flatnonzero(~objects.crowd)
    by_image = Objects(objects.group[plain] // classes, objects.boxes_xywh[plain], objects.crowd[plain])
    same, other = (np.zeros(rows.size), np.full(rows.size, -1)), (np.zeros(rows.size), np.full(rows.size, -1))
    for pairs in overlapping_pairs(ranked.group[rows] // classes, ranked.boxes_xyxy[rows], by_image, BACKGROUND_IOU):
        target = plain[pairs.target]
        is_same = ranked.classes[rows][pairs.detection] == matches.object_classes[target]
        for (best, best_target), chosen in ((same, is_same), (other, ~is_same)):
            _keep_best(pairs.detection[chosen], target[chosen], pairs.overlap[chosen], best, best_target)
    kind = np.select(
        [
            (same[0] >= BACKGROUND_IOU) & (same[0] < FOREGROUND_IOU),
            other[0] >= FOREGROUND_IOU,
            same[0] >= FOREGROUND_IOU,
            other[0] >= BACKGROUND_IOU,
        ],
        [LOCATION, CLASS, DUPLICATE, BOTH],
        BACKGROUND,
    )
    return kind, np.select([kind == LOCATION, kind == CLASS], [same[1], other[1]], -1)


def _keep_best(
    row: np.ndarray, target: np.ndarray, overlap: np.ndarray, best: np.ndarray, best_target: np.ndarray
) -> None:
    """Writes each row's largest overlap and its object, the first of equal ones, to ``best`` and ``best_target``."""
    order = np.lexsort((-target, overlap, row))
    row = row[order]
    last = np.flatnonzero(np.r_[row[1:] != row[:-1], True]) if row.size else np.zeros(0, dtype=np.int64)
    best[row[last]], best_target[row[last]] = overlap[order][last], target[order][last]


def _best_on_each(errors: Errors, kind: int, scores: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each unmatched object, the error of a kind about it with the highest score: its row, and the object."""
    candidate = np.flatnonzero(errors.kind == kind)
    candidate = candidate[~found[errors.target[candidate]]]
    row, target = errors.row[candidate], errors.target[candidate]
    order = np.lexsort((row, -scores[row], target))
    _, first = np.unique(target[order], return_index=True)
    return row[order][first], target[order][first]


def _ap(
    of_class: np.ndarray, scores: np.ndarray, true_positive: np.ndarray, counted: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """AP (C,) of detections with known outcomes; nan where ``targets`` (C,) is 0."""
    rows = np.flatnonzero(counted)
    rows = rows[np.lexsort((-scores[rows], of_class[rows]))]
    outcomes = known_outcomes(of_class[rows], scores[rows], true_positive[rows], targets.size)
    return interpolated_precision(outcomes, targets[:, None])[:, 0, 0].mean(-1)


def _mean(by_class: np.ndarray, targets: np.ndarray) -> float:
    return float(by_class[targets > 0].mean()) if targets.any() else float("nan")
