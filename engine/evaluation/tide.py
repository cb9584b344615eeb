"""Which mistakes cost a detector its AP: TIDE's error types (Bolya et al., ECCV 2020), at IoU 0.5.

A detection that takes no object is wrong for one reason, and an object that none takes is missed unless such a reason
explains it. Each kind's cost is by how much AP rises when an oracle mends the mistakes of that kind and no other.

Legend: D detections, M objects, C classes, W wrong detections.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.evaluation.average_precision import interpolated_precision
from engine.evaluation.matching import Objects, overlapping_pairs
from engine.evaluation.outcomes import Judgement, Verdicts

KINDS = ("class", "location", "both", "duplicate", "background", "missed")
CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED = range(6)
FOREGROUND, FAINT = 0.5, 0.1  # IoU from which on a box lies on an object, and from which on it has to do with it


class ErrorSplit(NamedTuple):
    """Columns of the second axes are `KINDS`. Classes without objects have no AP and are left out of the means."""

    ap: float  # at IoU 0.5
    counts: np.ndarray  # int64 (C, 6) by class of the detection, missed ones of the object
    class_cost: np.ndarray  # float64 (C, 6) AP to be gained; nan where there is no object
    cost: np.ndarray  # float64 (6,) their means
    false_positive_cost: float  # AP to be gained by leaving out all that is wrong
    false_negative_cost: float  # AP to be gained if objects that no detection takes were not there


class _Wrong(NamedTuple):
    """The wrong detections, with what was probably meant."""

    row: np.ndarray  # int64 (W,) of the ranked detections
    kind: np.ndarray  # int64 (W,)
    goal: np.ndarray  # int64 (W,) the object on which a detection of kind CLASS or LOCATION lies, else -1


def split_errors(judgement: Judgement) -> ErrorSplit:
    """The kinds of all errors among the detections that count, and what each kind costs.

    A detection is wrong in its LOCATION if its best IoU with objects of its class is in [0.1, 0.5), else in its CLASS
    if it has an IoU of at least 0.5 with an object of another, else a DUPLICATE if it has that with one of its own
    (which a better detection took), else in BOTH if it has at least 0.1 with an object of another, else on BACKGROUND.
    Objects that nothing takes are MISSED unless one of the first two kinds lies on them.

    Mending: the best of the detections wrong in their class, or in their location, that lie on an object nothing takes
    comes to take it, under its own score; the others of that kind, and all of the other kinds, are left out; missed
    objects are no longer asked for. (The authors' tool, where errors of class and of location lie on one object, mends
    only the better of the two.)
    """
    ranked, classes = judgement.ranked, judgement.num_classes
    right, counted, taken = _outcomes(judgement)
    plain = ~judgement.objects.crowd
    found = np.zeros(plain.size, dtype=bool)
    found[taken[right]] = True
    wrong = _explain(judgement, np.flatnonzero(counted & ~right))
    explained = np.zeros(plain.size, dtype=bool)
    explained[wrong.goal[wrong.goal >= 0]] = True
    missed = plain & ~found & ~explained

    of_object = judgement.object_classes
    targets = np.bincount(of_object[plain], minlength=classes)
    base = _ap(ranked.classes, ranked.scores, right, counted, targets)

    def cost(of_class: np.ndarray, now_right: np.ndarray, now_counted: np.ndarray, asked: np.ndarray) -> np.ndarray:
        mended = _ap(of_class, ranked.scores, now_right, now_counted, asked)
        return np.where(np.isnan(mended), base, mended) - base  # a class of which all is missed stays at its 0

    columns = []
    for kind in range(len(KINDS)):
        of_class, now_right, now_counted, asked = ranked.classes, right.copy(), counted.copy(), targets
        if kind == MISSED:
            asked = targets - np.bincount(of_object[missed], minlength=classes)
        else:
            now_counted[wrong.row[wrong.kind == kind]] = False
        if kind in (CLASS, LOCATION):
            row, goal = _best_on_each(wrong, kind, ranked.scores, found)
            now_right[row] = now_counted[row] = True
            of_class = of_class.copy()
            of_class[row] = of_object[goal]
        columns.append(cost(of_class, now_right, now_counted, asked))
    class_cost = np.stack(columns, 1)
    asked = np.bincount(of_object[found], minlength=classes)
    return ErrorSplit(
        ap=_mean(base, targets),
        counts=_count(wrong, ranked.classes, of_object[missed], classes),
        class_cost=class_cost,
        cost=np.array([_mean(column, targets) for column in class_cost.T]),
        false_positive_cost=_mean(cost(ranked.classes, right, right, targets), targets),
        false_negative_cost=_mean(cost(ranked.classes, right, counted, asked), targets),
    )


def _outcomes(judgement: Judgement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which detections are right, which count at all (not those in a crowd): bool (D,); and the object taken, or -1."""
    size, assignment = judgement.ranked.scores.size, judgement.assignment
    right, counted = np.zeros(size, dtype=bool), np.ones(size, dtype=bool)
    taken = np.full(size, -1, dtype=np.int64)
    matched, ignored = assignment.matched[:, 0, 0], assignment.ignored[:, 0, 0]
    right[assignment.contender] = matched & ~ignored
    counted[assignment.contender] = ~(matched & ignored)
    taken[assignment.contender] = assignment.taken
    return right, counted, taken


def _explain(judgement: Judgement, rows: np.ndarray) -> _Wrong:
    """Kinds of the wrong detections ``rows``."""
    classes, ranked, objects = judgement.num_classes, judgement.ranked, judgement.objects
    plain = np.flatnonzero(~objects.crowd)
    by_image = Objects(objects.group[plain] // classes, objects.boxes_xywh[plain], objects.crowd[plain])
    own, other = (np.zeros(rows.size), np.full(rows.size, -1)), (np.zeros(rows.size), np.full(rows.size, -1))
    for pairs in overlapping_pairs(ranked.group[rows] // classes, ranked.boxes_xyxy[rows], by_image, FAINT):
        target = plain[pairs.target]
        same = ranked.classes[rows][pairs.detection] == judgement.object_classes[target]
        for (overlap, goal), of_kind in ((own, same), (other, ~same)):
            _keep_best(pairs.detection[of_kind], target[of_kind], pairs.overlap[of_kind], overlap, goal)
    kind = np.select(
        [
            (own[0] >= FAINT) & (own[0] < FOREGROUND),
            other[0] >= FOREGROUND,
            own[0] >= FOREGROUND,
            other[0] >= FAINT,
        ],
        [LOCATION, CLASS, DUPLICATE, BOTH],
        BACKGROUND,
    )
    goal = np.select([kind == LOCATION, kind == CLASS], [own[1], other[1]], -1)
    return _Wrong(rows, kind, goal)


def _keep_best(row: np.ndarray, target: np.ndarray, overlap: np.ndarray, best: np.ndarray, goal: np.ndarray) -> None:
    """Writes each row's largest overlap and its object, the first of equal ones, into ``best`` and ``goal``."""
    order = np.lexsort((-target, overlap, row))
    row = row[order]
    last = np.flatnonzero(np.r_[row[1:] != row[:-1], True]) if row.size else np.zeros(0, dtype=np.int64)
    best[row[last]], goal[row[last]] = overlap[order][last], target[order][last]


def _best_on_each(wrong: _Wrong, kind: int, scores: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the detections of a kind on each object that nothing takes, the one with the highest score; and the object."""
    candidate = np.flatnonzero(wrong.kind == kind)
    candidate = candidate[~found[wrong.goal[candidate]]]
    row, goal = wrong.row[candidate], wrong.goal[candidate]
    order = np.lexsort((row, -scores[row], goal))
    _, first = np.unique(goal[order], return_index=True)
    return row[order][first], goal[order][first]


def _ap(
    of_class: np.ndarray, scores: np.ndarray, right: np.ndarray, counted: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """AP (C,) of detections whose outcome is known; nan where ``targets`` (C,) is 0."""
    rows = np.flatnonzero(counted)
    rows = rows[np.lexsort((-scores[rows], of_class[rows]))]
    hit = right[rows]
    verdicts = Verdicts(
        class_offsets=np.searchsorted(of_class[rows], np.arange(targets.size + 1)),
        scores=scores[rows],
        classes=of_class[rows],
        wrong_if_alone=~hit[:, None],
        contender=np.flatnonzero(hit),
        right=np.ones((int(hit.sum()), 1, 1), dtype=bool),
        wrong=np.zeros((int(hit.sum()), 1, 1), dtype=bool),
    )
    return interpolated_precision(verdicts, targets[:, None])[:, 0, 0].mean(-1)


def _mean(by_class: np.ndarray, targets: np.ndarray) -> float:
    return float(by_class[targets > 0].mean()) if targets.any() else float("nan")


def _count(wrong: _Wrong, of_detection: np.ndarray, missed: np.ndarray, classes: int) -> np.ndarray:
    cell = np.r_[of_detection[wrong.row] * len(KINDS) + wrong.kind, missed * len(KINDS) + MISSED]
    return np.bincount(cell, minlength=classes * len(KINDS)).reshape(classes, len(KINDS)).astype(np.int64)
