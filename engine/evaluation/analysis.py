"""What reports say besides the metrics: the kinds of errors, and how exactly AP is known.

The kinds of errors follow TIDE (Bolya et al., ECCV 2020), at IoU 0.5. Each false positive has one kind. An object that
no detection matches is missed unless a false positive explains it. The cost of a kind is the rise of AP if an oracle
fixes the errors of that kind and no others. There are three differences from TIDE: a misplaced detection is one of an
object that no other finds; classes are confused as in the confusion matrix; the oracle finds missed objects, where
TIDE's no longer counts them, which leaves a class without any detection at AP 0.

Legend: D detections, M objects, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import (
    ALL_SIZES,
    IOU_50,
    DetectionOutcomes,
    Matches,
    Objects,
    Pairs,
    overlapping_pairs,
    sort_by_class,
)
from engine.evaluation.metrics import confused_objects, interpolated_precision, nanmean

KINDS = ("class", "location", "both", "duplicate", "background", "missed")
CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED = range(6)
CORRECT, IN_CROWD = -1, -2  # outcomes of detections besides the kinds
FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1  # TIDE's t_f and t_b
JACKKNIFE_GROUPS = 20
FEW_IMAGES = 10  # with objects; with fewer, the error of AP is not known


class Errors(NamedTuple):
    """Outcome of each ranked detection and each object of `Matches`."""

    outcome: np.ndarray  # int64 (D,) `CORRECT`, `IN_CROWD` (a crowd region), or the kind of a false positive
    target: np.ndarray  # int64 (D,) the object that an error of CLASS or LOCATION is about, else -1
    detected: np.ndarray  # bool (M,) objects that a true positive matches
    missed: np.ndarray  # bool (M,) objects that nothing matches and no error explains


def find_errors(matches: Matches) -> Errors:
    """Finds the kind of each false positive, and the missed objects.

    A false positive has the first of these kinds that applies:

    - CLASS: the confusion matrix matches it with an object of another class (`confused_objects`).
    - LOCATION: its best IoU with objects of its class is below 0.5, and it is at least 0.1 with one of these that no
      true positive matches.
    - CLASS: it has an IoU of at least 0.5 with an object of another class.
    - DUPLICATE: it has an IoU of at least 0.5 with an object of its class, which a better detection matched.
    - BOTH: it has an IoU of at least 0.1 with an object of another class that no true positive matches.
    - BACKGROUND: any other.

    An unmatched object is MISSED unless an error of LOCATION or CLASS is about it. So an object that the confusion
    matrix counts as background is missed, or has only misplaced detections.
    """
    ranked = matches.ranked
    objects = matches.objects
    is_correct, is_ignored = matches.outcomes_50()
    outcome = np.select([is_correct, is_ignored], [CORRECT, IN_CROWD], BACKGROUND)
    false = np.flatnonzero(outcome == BACKGROUND)
    detected = np.zeros(objects.crowd.size, dtype=bool)
    detected[matches.detected_objects()] = True
    # Pairs of any classes: a group is an image.
    classes = matches.num_classes
    not_crowd = np.flatnonzero(~objects.crowd)
    by_image = Objects(objects.group[not_crowd] // classes, objects.boxes_xywh[not_crowd], objects.crowd[not_crowd])
    pairs = overlapping_pairs(ranked.group[false] // classes, ranked.boxes_xyxy[false], by_image, BACKGROUND_IOU)
    pairs = pairs._replace(target=not_crowd[pairs.target])
    is_same = ranked.classes[false][pairs.detection] == matches.object_classes[pairs.target]
    is_open = ~detected[pairs.target]
    same, _ = _best_of_each(pairs.take(is_same), false.size)
    open_same, open_same_target = _best_of_each(pairs.take(is_same & is_open), false.size)
    other, other_target = _best_of_each(pairs.take(~is_same), false.size)
    open_other, _ = _best_of_each(pairs.take(~is_same & is_open), false.size)
    confused = confused_objects(matches)[false]
    kind = np.select(
        [
            confused >= 0,
            (same < FOREGROUND_IOU) & (open_same >= BACKGROUND_IOU),
            other >= FOREGROUND_IOU,
            same >= FOREGROUND_IOU,
            open_other >= BACKGROUND_IOU,
        ],
        [CLASS, LOCATION, CLASS, DUPLICATE, BOTH],
        BACKGROUND,
    )
    outcome[false] = kind
    target = np.full(outcome.size, -1)
    target[false] = np.select(
        [confused >= 0, kind == LOCATION, kind == CLASS], [confused, open_same_target, other_target], -1
    )
    missed = ~objects.crowd & ~detected
    missed[target[target >= 0]] = False
    return Errors(outcome, target, detected, missed)


def _best_of_each(pairs: Pairs, detections: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest overlap of each detection, and its object, the first of equal ones; 0 and -1 if there is
    none."""
    pairs = pairs.take(np.lexsort((-pairs.target, pairs.overlap)))  # the largest is written last
    best = np.zeros(detections)
    target = np.full(detections, -1)
    best[pairs.detection] = pairs.overlap
    target[pairs.detection] = pairs.target
    return best, target


class ErrorSplit(NamedTuple):
    """Errors of each of the 6 kinds and their costs. Means leave out classes without objects."""

    ap: float  # at IoU 0.5
    counts: np.ndarray  # int64 (C, 6) by class of the detection; missed ones by class of the object
    class_cost: np.ndarray  # float64 (C, 6) rise of AP; nan where there is no object
    cost: np.ndarray  # float64 (6,) mean over the classes
    false_positive_cost: float  # rise of AP without any false positive
    false_negative_cost: float  # rise of AP if all objects were detected


def split_errors(matches: Matches) -> ErrorSplit:
    """Counts the errors of each kind (`find_errors`) among the detections that count, and measures the cost of each.

    An oracle fixes one kind at a time. Of the errors of CLASS, or of LOCATION, about an unmatched object, the one with
    the highest score becomes a true positive with its own score, and the others of that kind are removed. Errors of
    the other kinds are removed. A missed object is detected with a score above all others. (If errors of CLASS and of
    LOCATION are about one object, the authors' tool fixes only the better of the two.)
    """
    errors = find_errors(matches)
    outcome = errors.outcome
    scores = matches.ranked.scores
    classes = matches.ranked.classes
    by_score = np.argsort(-scores, kind="stable")  # sorted once, because this takes most of the time

    is_object = ~matches.objects.crowd
    targets = np.bincount(matches.object_classes[is_object], minlength=matches.num_classes)

    def class_ap(
        counted: np.ndarray,
        correct: np.ndarray = outcome == CORRECT,
        classes: np.ndarray = matches.ranked.classes,
        found: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns AP (C,) of the detections ``counted``, bool (D,); nan where there is no object. ``correct``: bool
        (D,). ``found``: bool (M,), objects that are also detected, before all others."""
        rows = by_score[counted[by_score]]
        extra = matches.object_classes[np.zeros_like(is_object) if found is None else found]
        is_right = np.concatenate([np.ones(extra.size, bool), correct[rows]])
        ranked_classes = np.concatenate([extra, classes[rows]])
        short_classes = ranked_classes.astype(np.min_scalar_type(targets.size))  # NumPy sorts 16 bits in linear time
        order = np.argsort(short_classes, kind="stable")
        true_positive = is_right[order, None, None]  # `ALL_SIZES` and `IOU_50` only
        outcomes = DetectionOutcomes(ranked_classes[order], true_positive, ~true_positive)
        return interpolated_precision(outcomes, targets[:, None])[:, ALL_SIZES, IOU_50].mean(-1)

    is_counted = outcome != IN_CROWD
    ap = class_ap(is_counted)
    fixed_ap = []
    for kind in range(len(KINDS)):
        counted = is_counted & (outcome != kind)
        if kind == MISSED:
            fixed = class_ap(counted, found=errors.missed)
        elif kind in (CLASS, LOCATION):
            row = np.flatnonzero(outcome == kind)
            row = row[~errors.detected[errors.target[row]]]
            row = row[np.lexsort((row, -scores[row], errors.target[row]))]
            best = row[np.unique(errors.target[row], return_index=True)[1]]  # of each object
            fixed_classes = classes.copy()
            fixed_classes[best] = matches.object_classes[errors.target[best]]
            correct = outcome == CORRECT
            correct[best] = counted[best] = True
            fixed = class_ap(counted, correct, fixed_classes)
        else:
            fixed = class_ap(counted)
        fixed_ap.append(fixed)
    class_cost = np.stack(fixed_ap, 1) - ap[:, None]
    is_false = outcome >= 0
    cells = np.concatenate(
        [
            classes[is_false] * len(KINDS) + outcome[is_false],
            matches.object_classes[errors.missed] * len(KINDS) + MISSED,
        ]
    )
    counts = np.bincount(cells, minlength=matches.num_classes * len(KINDS))
    return ErrorSplit(
        ap=float(nanmean(ap)),
        counts=counts.reshape(matches.num_classes, len(KINDS)).astype(np.int64),
        class_cost=class_cost,
        cost=nanmean(class_cost, axis=0),
        false_positive_cost=float(nanmean(class_ap(outcome == CORRECT) - ap)),
        false_negative_cost=float(nanmean(class_ap(is_counted, found=is_object & ~errors.detected) - ap)),
    )


def confused_pairs(confusion: np.ndarray) -> list[tuple[int, int, int]]:
    """Lists pairs of classes that are confused, the most frequent first: count of objects, predicted, true class."""
    pairs = [(int(confusion[p, t]), int(p), int(t)) for p, t in np.argwhere(confusion[:-1, :-1]) if p != t]
    return sorted(pairs, key=lambda pair: (-pair[0], *pair[1:]))


def images_with_objects(matches: Matches) -> int:
    """Counts the images in which an object is to be found."""
    return len(np.unique(matches.objects.group[~matches.objects.crowd] // matches.num_classes))


def ap_error(matches: Matches) -> float:
    """Estimates the standard error of AP (IoU 0.50:0.95) as a measure of all images of this kind, by the jackknife:
    the AP without each of `JACKKNIFE_GROUPS` groups of images (Tukey 1958). nan if fewer than `FEW_IMAGES` images have
    objects."""
    classes = matches.num_classes
    outcomes = sort_by_class(matches)
    image = matches.ranked.group[matches.by_class] // classes
    is_object = ~matches.ignored[:, ALL_SIZES]
    object_image = matches.objects.group[is_object] // classes
    object_class = matches.object_classes[is_object]
    images, object_image = np.unique(object_image, return_inverse=True)
    if len(images) < FEW_IMAGES:
        return float("nan")
    groups = min(JACKKNIFE_GROUPS, len(images))
    group = np.searchsorted(images, image) % groups
    ap = []
    for left_out in range(groups):
        rows = group != left_out
        kept = DetectionOutcomes(
            classes=outcomes.classes[rows],
            true_positive=outcomes.true_positive[rows, :1],  # `ALL_SIZES`
            false_positive=outcomes.false_positive[rows, :1],
        )
        targets = np.bincount(object_class[object_image % groups != left_out], minlength=classes)
        ap.append(float(nanmean(interpolated_precision(kept, targets[:, None]))))
    return float(np.sqrt((groups - 1) * np.var(ap)))
