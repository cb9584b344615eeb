"""Labels that a trained model disagrees with, ranked over a whole split.

There are four kinds: missing labels, wrong classes and badly placed boxes, as in ObjectLab (Tkachenko, Thyagarajan,
Mueller 2023), and spurious labels, where the model detects nothing. A score is the posterior probability of the error,
with `ERROR_RATE` as the prior. It compares the likelihood of the model's detections if the label is wrong and if it is
right; the latter is estimated from all labels of the class, as in confident learning (Northcutt, Jiang, Chuang 2021).
Scores of different kinds are therefore comparable. They are lowered for classes that the model detects poorly, since it
contradicts more correct labels of these classes than wrong ones. Labels of classes that it hardly detects are not
judged at all, nor are positions in classes whose boxes it places badly. Some boxes always fit worst, so the prior for
positions is estimated as well.

Legend: D detections, M labels, P pairs of the two, C classes. Boxes are in original pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import Objects, Pairs, match_by_overlap, overlapping_pairs
from engine.evaluation.result import EvalResult
from engine.issues.issue import (
    BADLY_PLACED,
    LABEL_ERRORS,
    MISSING_LABEL,
    SPURIOUS,
    WRONG_CLASS,
    CheckedSplit,
    Issue,
    LabelBox,
)
from engine.issues.label_statistics import (
    ERROR_RATE,
    deviations_below,
    estimated_rate,
    fraction_at_most,
    local_precision,
    posterior,
)
from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable
from utils.labels import GroundTruth
from utils.strings import counted, listed

SAME_OBJECT = 0.5  # minimum IoU of a detection and a label of one object
NEAR_OBJECT = 0.25  # minimum IoU at which a label may be a badly placed box of the detected object
TOUCHING = 0.1  # minimum IoU at which a detection counts as weak support for a label
MIN_AP = 0.4  # AP50 and AP75 of a class on the split below which its labels are not judged
GOOD_AP50 = 0.7  # AP50 at which a class is fully trusted
GOOD_AP75 = 0.9  # the same for positions, by AP75, because AP50 says little about how exactly boxes are placed
MIN_SUPPORT = 0.3  # score below which the model hardly sees an object; how far below says nothing about its label
MIN_DETECTION_SCORE = 0.01  # even detections with low scores show that the model sees something
MAX_PRECISION = 0.99  # upper limit of a detection's precision: no score makes an object certain


class _LabelError(NamedTuple):
    """A label error before it becomes an `Issue`."""

    score: float
    kind: str
    detection: int  # suggested correction; -1: the label should be removed
    label: int | None  # None: there is no label


def find_label_errors(
    split: CheckedSplit, table: DetectionTable, class_metrics: Mapping[str, np.ndarray], min_score: float = 0.0
) -> list[Issue]:
    """Finds label errors that score at least ``min_score``, at most one per label and one per detection without a
    label.

    Crowd regions explain detections, but are not examined; nor are repeated rows, which the scan reports.

    Args:
        table: all detections of the model; those below `MIN_DETECTION_SCORE` are not used.
        class_metrics: AP50 and AP75 of these detections, float (C,). Classes below `MIN_AP` are not judged.

    Returns issues, the most probable first.
    """
    truth = split.index.ground_truth()
    is_repeated = split.index.repeated
    confident_rows = np.flatnonzero(table.scores > MIN_DETECTION_SCORE)
    by_image = np.argsort(table.image_index[confident_rows], kind="stable")
    table = table.take(confident_rows[by_image])
    # All pairs of a detection and a label, of any classes.
    objects = Objects(truth.image_of_box, truth.boxes_xywh_px, truth.crowd)
    pairs = overlapping_pairs(table.image_index, table.boxes_xyxy_px, objects, TOUCHING)
    pairs = pairs.take(~is_repeated[pairs.target])
    evidence = _Evidence(truth, table, pairs, _match(truth, table, pairs))
    trust = _ClassTrust(_trust(class_metrics["AP50"], GOOD_AP50), _trust(class_metrics["AP75"], GOOD_AP75))
    is_examined = ~truth.crowd & ~is_repeated
    min_score = max(min_score, np.finfo(float).tiny)  # a score of 0 is not an error
    errors = _wrong_labels(evidence, trust, is_examined, min_score)
    errors += _missing_labels(evidence, trust, min_score)
    errors.sort(key=lambda error: -error.score)
    return [_to_issue(split, table, error) for error in errors]


class _ClassTrust(NamedTuple):
    """Weights, 0 to 1, of the label errors of each class."""

    class_and_presence: np.ndarray  # float64 (C,)
    position: np.ndarray  # float64 (C,), a further factor for positions


def _trust(class_ap: np.ndarray, good_ap: float) -> np.ndarray:
    """Returns the weight of a class's label errors, 0 to 1, float64 (C,), by its AP; 0 for nan."""
    return np.where(class_ap >= MIN_AP, np.minimum(class_ap / good_ap, 1), 0)


class _Evidence(NamedTuple):
    """The labels of a split, and the model's detections."""

    truth: GroundTruth  # M labels
    table: DetectionTable  # D detections
    pairs: Pairs  # all P that touch, of any classes
    matched: _Match


class _Match(NamedTuple):
    """One-to-one matches of detections and labels with an IoU of at least `NEAR_OBJECT`, by overlap times score."""

    label: np.ndarray  # int64 (D,) label of each detection; -1: none
    detection: np.ndarray  # int64 (M,) detection of each label; -1: none
    overlap: np.ndarray  # float64 (M,) IoU with it; 0: none


def _match(truth: GroundTruth, table: DetectionTable, pairs: Pairs) -> _Match:
    pairs = pairs.take(pairs.overlap >= NEAR_OBJECT)
    scores = table.scores[pairs.detection]
    weighted = pairs._replace(overlap=pairs.overlap * scores)
    label = match_by_overlap(weighted, scores, len(table.scores), len(truth.classes))
    is_match = label[pairs.detection] == pairs.target
    detection = np.full(len(truth.classes), -1)
    overlap = np.zeros(len(truth.classes))
    detection[pairs.target[is_match]] = pairs.detection[is_match]
    overlap[pairs.target[is_match]] = pairs.overlap[is_match]
    return _Match(label, detection, overlap)


def _wrong_labels(
    evidence: _Evidence, trust: _ClassTrust, is_examined: np.ndarray, min_score: float
) -> list[_LabelError]:
    """Returns the most probable error of each label that ``is_examined``, bool (M,), if it scores at least
    ``min_score``."""
    suspicions = [
        _suspect_wrong_class(evidence, trust),
        _suspect_badly_placed(evidence, trust),
        _suspect_spurious(evidence, trust),
    ]
    scores = np.stack([suspicion.score for suspicion in suspicions])
    best = scores.argmax(0)
    errors = []
    for label in np.flatnonzero(is_examined & (scores.max(0) >= min_score)).tolist():
        suspicion = suspicions[best[label]]
        score = float(suspicion.score[label])
        errors.append(_LabelError(score, suspicion.kind, int(suspicion.suggestion[label]), label))
    return errors


class _Suspicion(NamedTuple):
    """Probabilities that labels have an error of one kind, lowered by the trust in their classes."""

    kind: str
    score: np.ndarray  # float64 (M,)
    suggestion: np.ndarray  # int64 (M,), the detection that would correct the label; -1: none


def _suspect_wrong_class(evidence: _Evidence, trust: _ClassTrust) -> _Suspicion:
    """Compares the best detection of another class on an object with the best one of the label's class. Both classes
    must be trusted."""
    truth, table, pairs, _ = evidence
    count = len(truth.classes)
    score = table.scores[pairs.detection]
    is_same = table.classes[pairs.detection] == truth.classes[pairs.target]
    on_object = pairs.overlap >= SAME_OBJECT
    same, _ = _best(pairs, score, is_same & on_object, count)
    other, suggestion = _best(pairs, score, ~is_same & on_object, count)
    p_wrong_class = posterior(other, np.maximum(same, MIN_DETECTION_SCORE))
    p_wrong_class *= trust.class_and_presence[truth.classes]
    has_suggestion = suggestion >= 0
    p_wrong_class[has_suggestion] *= trust.class_and_presence[table.classes[suggestion[has_suggestion]]]
    return _Suspicion(WRONG_CLASS, p_wrong_class, suggestion)


def _suspect_badly_placed(evidence: _Evidence, trust: _ClassTrust) -> _Suspicion:
    """Compares how well each label overlaps its detection with how well other labels of the class overlap theirs."""
    truth, table, _, matched = evidence
    count = len(truth.classes)
    rows = np.flatnonzero(matched.detection >= 0)
    rows = rows[table.classes[matched.detection[rows]] == truth.classes[rows]]
    p_misplaced = np.zeros(count)
    suggestion = np.full(count, -1)
    suggestion[rows] = matched.detection[rows]
    deviations = deviations_below(matched.overlap[rows], truth.classes[rows], min_overlap=SAME_OBJECT)
    overlaps_less = fraction_at_most(matched.overlap[rows], truth.classes[rows])
    # People also draw boxes loosely.
    offset_likelihood = np.minimum((1 - matched.overlap[rows]) / (1 - SAME_OBJECT), 1) ** 2
    likelihood_if_misplaced = table.scores[suggestion[rows]] * offset_likelihood
    likelihood_if_correct = np.maximum(overlaps_less, np.exp(-deviations))
    rate = estimated_rate(likelihood_if_misplaced, likelihood_if_correct)
    p_misplaced[rows] = posterior(likelihood_if_misplaced, likelihood_if_correct, rate)
    p_misplaced = p_misplaced * trust.class_and_presence[truth.classes] * trust.position[truth.classes]
    return _Suspicion(BADLY_PLACED, p_misplaced, suggestion)


def _suspect_spurious(evidence: _Evidence, trust: _ClassTrust) -> _Suspicion:
    """Measures how little the model detects, of any class, near each label."""
    truth, table, pairs, _ = evidence
    pair_support = table.scores[pairs.detection] * np.minimum(pairs.overlap / SAME_OBJECT, 1)
    is_any = np.ones(len(pair_support), bool)
    support, _ = _best(pairs, pair_support, is_any, len(truth.classes))
    supported_less = fraction_at_most(np.maximum(support, MIN_SUPPORT), truth.classes)
    p_spurious = posterior((1 - support) ** 2, np.maximum(supported_less, support))
    p_spurious = p_spurious * trust.class_and_presence[truth.classes]
    return _Suspicion(SPURIOUS, p_spurious, np.full(len(truth.classes), -1))


def _missing_labels(evidence: _Evidence, trust: _ClassTrust, min_score: float) -> list[_LabelError]:
    """Returns an error for each detection without a label whose error scores at least ``min_score``."""
    table = evidence.table
    detections, scores = _unlabeled(table, evidence.pairs, evidence.matched)
    scores = scores * trust.class_and_presence[table.classes[detections]]
    return [
        _LabelError(score, MISSING_LABEL, detection, None)
        for detection, score in zip(detections.tolist(), scores.tolist())
        if score >= min_score
    ]


def _unlabeled(table: DetectionTable, pairs: Pairs, matched: _Match) -> tuple[np.ndarray, np.ndarray]:
    """Finds detections without a label; only the best of several that overlap each other.

    Returns them, int64 (n,), the most confident first, and the scores (n,) of their missing labels.
    """
    is_matched = matched.label >= 0
    is_explained = is_matched.copy()
    is_explained[pairs.detection[pairs.overlap >= SAME_OBJECT]] = True
    rows = np.flatnonzero(~is_explained)
    rows = rows[_is_best(table, rows)]
    rows = rows[np.argsort(-table.scores[rows], kind="stable")]
    used = np.sort(np.r_[np.flatnonzero(is_matched), rows])
    precision = np.zeros(len(table.scores))
    precision[used] = local_precision(table.scores[used], is_matched[used], table.classes[used])
    real = np.minimum(precision[rows], MAX_PRECISION)
    # Either it is an object, whose label is missing at the prior rate, or it is none: then the rate cancels.
    return rows, posterior(real, (1 - real) / (1 - ERROR_RATE))


def _is_best(table: DetectionTable, rows: np.ndarray) -> np.ndarray:
    """Returns whether no detection in ``rows``, int64 (n,), of any class, has a higher score on the same object: bool
    (n,)."""
    boxes = table.boxes_xyxy_px[rows]
    objects = Objects(table.image_index[rows], xyxy_to_xywh(boxes), np.zeros(len(rows), bool))
    rank = np.empty(len(rows), np.int64)
    rank[np.argsort(-table.scores[rows], kind="stable")] = np.arange(len(rows))
    is_best = np.ones(len(rows), bool)
    near = overlapping_pairs(table.image_index[rows], boxes, objects, SAME_OBJECT)
    is_best[near.detection[rank[near.detection] > rank[near.target]]] = False
    return is_best


def _best(pairs: Pairs, value: np.ndarray, chosen: np.ndarray, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the largest ``value`` among the ``chosen`` pairs of each label.

    Returns values float64 (M,), 0 where there is none, and their detections int64 (M,), -1 where there is none.
    """
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(value[rows], kind="stable")]  # the largest is written last
    best = np.zeros(labels)
    detection = np.full(labels, -1)
    best[pairs.target[rows]] = value[rows]
    detection[pairs.target[rows]] = pairs.detection[rows]
    return best, detection


def _to_issue(split: CheckedSplit, table: DetectionTable, error: _LabelError) -> Issue:
    labeled = None if error.label is None else split.box(error.label)
    suggestion = None
    if error.detection >= 0:
        class_id = int(table.classes[error.detection])
        box = table.boxes_xyxy_px[error.detection]
        suggestion = LabelBox(split.index.names[class_id], class_id, tuple(box.tolist()))
    image = int(table.image_index[error.detection]) if error.label is None else split.image_of(error.label)
    return Issue(
        kind=error.kind,
        text=_description(error.kind, labeled, suggestion),
        split=split.name,
        images=(split.index.paths[image],),
        where="" if labeled is None else labeled.where or "",
        boxes=() if labeled is None else (labeled,),
        score=round(error.score, 4),
        suggestion=suggestion,
    )


def _description(kind: str, labeled: LabelBox | None, suggestion: LabelBox | None) -> str:
    """Describes a label error, given the box as labeled (None if it is missing) and as it should be (None: removed)."""
    labeled_name = "" if labeled is None else labeled.class_name
    name = labeled_name if suggestion is None else suggestion.class_name
    return {
        MISSING_LABEL: f"{name} without a label",
        SPURIOUS: f"{name} where the model sees nothing",
        WRONG_CLASS: f"{labeled_name} that looks like {name}",
        BADLY_PLACED: f"{name} that the model places elsewhere",
    }[kind]


def trust_lines(
    model: str, results: Mapping[str, EvalResult], names: Sequence[str], issues: Iterable[Issue]
) -> list[str]:
    """Describes how far a model can be trusted to judge labels.

    Args:
        model: how the sentences name the model.
        results: scores, by split, of the detections that `find_label_errors` receives.
        issues: all that are listed.
    """
    with_objects = {split: result for split, result in results.items() if result.class_targets.any()}
    if not with_objects:
        return []
    aps = ", ".join(f"AP {result.ap:.3f} on {split}" for split, result in with_objects.items())
    lines = [f"{model} has {aps}."]
    for split, result in with_objects.items():
        lines += _unjudged_classes(split, result, names)
    scores = [issue.score for issue in issues if issue.kind in LABEL_ERRORS and issue.score is not None]
    if scores:
        lines.append(
            f"Of {counted(len(scores), 'listed label error')}, about {sum(scores):.0f} are real if {ERROR_RATE:.0%} of "
            "the labels have an error of each kind (positions: as estimated); fewer if the labels are better."
        )
    return lines


def _unjudged_classes(split: str, result: EvalResult, names: Sequence[str]) -> Iterator[str]:
    """Yields sentences about the classes whose labels, or their positions, are not judged (`MIN_AP`)."""
    ap50 = result.class_metrics["AP50"]
    ap75 = result.class_metrics["AP75"]
    weak = np.flatnonzero(ap50 < MIN_AP)
    if weak.size:
        classes = listed([f"{names[c]} (AP50 {ap50[c]:.2f})" for c in weak.tolist()])
        yield (
            f"On {split} it is too weak to judge labels of {classes}, or too many of them are wrong: their errors are "
            "not listed."
        )
    loose = np.flatnonzero((ap50 >= MIN_AP) & (ap75 < MIN_AP))
    if loose.size:
        classes = listed([f"{names[c]} (AP75 {ap75[c]:.2f})" for c in loose.tolist()])
        yield f"On {split} it places boxes of {classes} too loosely to judge where labels are."
