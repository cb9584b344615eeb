"""Finds the labels that a model contradicts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.evaluation.analysis import BACKGROUND_IOU
from engine.evaluation.matching import Objects, overlapping_pairs
from engine.report.issues import CheckedSplit, Issue, LabelBox
from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable
from utils.strings import listed

MISSING_LABEL = "missing label"
WRONG_CLASS = "wrong class"
LABEL_ERRORS = (MISSING_LABEL, WRONG_CLASS)  # kinds of issues that need a model
SAME_OBJECT = 0.5  # minimum IoU of a detection and a label of one object
MIN_AP50 = 0.5  # labels of classes with a lower AP50 are not judged


def find_label_errors(
    split: CheckedSplit, table: DetectionTable, class_ap50: np.ndarray, min_score: float = 0.0
) -> list[Issue]:
    """Finds objects without a label, and labels of another class, that a model contradicts with confidence.

    A detection is confident if it scores at least the mean of the best detections of its class's labels, as in
    confident learning (Northcutt, Jiang, Chuang 2021). If it overlaps no label by `SAME_OBJECT`, that of its object is
    missing, with its confidence as the score, unless it overlaps a label of its class by `BACKGROUND_IOU`: then it is
    misplaced. If it is the best on a label of another class, this class is wrong; the score is how much it exceeds the
    best detection of the label's own class.

    Crowd regions explain detections; they and repeated rows are not examined.

    Args:
        table: all detections of the model, D.
        class_ap50: AP50 of each class, float (C,). Classes below `MIN_AP50` are neither judged nor suggested.

    Returns issues that score at least ``min_score``, the highest first.
    """
    truth = split.index.ground_truth()
    row_of = split.index.rows_of_ground_truth()
    table = table.take(np.argsort(table.image_index, kind="stable"))
    objects = Objects(truth.image_of_box, truth.boxes_xywh_px, truth.crowd)
    near = overlapping_pairs(table.image_index, table.boxes_xyxy_px, objects, BACKGROUND_IOU)
    pairs = near.take(near.overlap >= SAME_OBJECT)
    score = table.scores[pairs.detection]
    is_own_class = table.classes[pairs.detection] == truth.classes[pairs.target]
    own_score = np.zeros(len(truth.classes))  # best of each label's own class
    np.maximum.at(own_score, pairs.target[is_own_class], score[is_own_class])

    confident = np.full(len(split.index.names), np.inf)  # by class
    for c in np.flatnonzero(np.nan_to_num(class_ap50) >= MIN_AP50):
        found = own_score[(truth.classes == c) & (own_score > 0)]
        if found.size:
            confident[c] = found.mean()
    is_confident = table.scores >= confident[table.classes]

    errors = []
    is_examined = ~truth.crowd & ~split.index.repeated[row_of] & np.isfinite(confident[truth.classes])
    other = pairs.take(~is_own_class & is_confident[pairs.detection] & is_examined[pairs.target])
    best = dict(zip(other.target.tolist(), other.detection.tolist()))
    for label, detection in zip(other.target.tolist(), other.detection.tolist()):
        if table.scores[detection] > table.scores[best[label]]:
            best[label] = detection
    for label, detection in best.items():
        errors.append((float(table.scores[detection] - own_score[label]), detection, int(row_of[label])))

    is_misplaced = (table.classes[near.detection] == truth.classes[near.target]) & ~truth.crowd[near.target]
    is_confident[near.detection[(near.overlap >= SAME_OBJECT) | is_misplaced]] = False  # explained by a label
    rows = np.flatnonzero(is_confident)
    rows = rows[_is_best_of_object(table.take(rows))]
    errors += [(float(table.scores[row]), row, -1) for row in rows.tolist()]
    errors.sort(key=lambda error: (-error[0], error[1]))
    return [_issue(split, table, *error) for error in errors if error[0] > 0 and error[0] >= min_score]


def _is_best_of_object(table: DetectionTable) -> np.ndarray:
    """Returns whether no detection of any class that overlaps one by `SAME_OBJECT` has a higher score: bool (D,)."""
    objects = Objects(table.image_index, xyxy_to_xywh(table.boxes_xyxy_px), np.zeros(len(table.scores), bool))
    near = overlapping_pairs(table.image_index, table.boxes_xyxy_px, objects, SAME_OBJECT)
    rank = np.argsort(np.argsort(-table.scores, kind="stable"))
    is_best = np.ones(len(table.scores), bool)
    is_best[near.detection[rank[near.detection] > rank[near.target]]] = False
    return is_best


def _issue(split: CheckedSplit, table: DetectionTable, score: float, detection: int, label: int) -> Issue:
    """Creates the issue of a label, or of a missing one (-1)."""
    class_id = int(table.classes[detection])
    name = split.index.names[class_id]
    labeled = () if label < 0 else (split.box(label),)
    what = labeled[0].class_name if labeled else "object without a label"
    corners = labeled[0].xyxy_px if labeled else tuple(table.boxes_xyxy_px[detection].tolist())
    return Issue(
        kind=WRONG_CLASS if labeled else MISSING_LABEL,
        text=f"{what} that looks like {name}",
        split=split.name,
        images=(split.index.paths[int(table.image_index[detection])],),
        where=(labeled[0].where or "") if labeled else "",
        boxes=labeled,
        score=round(score, 4),
        suggestion=LabelBox(name, class_id, corners),
    )


def unjudged_classes(class_ap50: np.ndarray, names: Iterable[str]) -> str:
    """Names the classes whose labels `find_label_errors` does not judge; "" if there is none."""
    weak = [f"{name} (AP50 {ap50:.2f})" for name, ap50 in zip(names, class_ap50.tolist()) if ap50 < MIN_AP50]
    return f"it is too weak to judge labels of {listed(weak)}" if weak else ""
