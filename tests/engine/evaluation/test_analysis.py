"""Kinds of errors and scores by size, compared with a literal implementation of the definitions, with
counting, and with pycocotools."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from engine.evaluation.analysis import KINDS, ap_error, split_errors
from engine.evaluation.matching import SIZES, match_detections
from engine.evaluation.metrics import score_detections
from engine.evaluation.tables import size_rows
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table, random_case, reference_iou
from utils.boxes import xywh_to_xyxy


def average_precision(found, objects):
    """Returns 101-point AP of [(score, is_correct)] by its definition; of equal scores, correct ones come first."""
    hits = 0
    points = []
    for number, (_, right) in enumerate(sorted(found, key=lambda d: -d[0]), 1):
        hits += right
        points.append((hits / objects, hits / (number + np.spacing(1))))
    return np.mean([max((p for r, p in points if r >= recall), default=0.0) for recall in np.linspace(0, 1, 101)])


class SplitErrors(NamedTuple):
    """Counts by class and kind (C, 6), AP at IoU 0.5, and how much it would rise without the errors: by kind (6,), of
    all false positives, of all objects that are not found."""

    counts: np.ndarray
    ap: float
    cost: list[float]
    false_positive_cost: float
    false_negative_cost: float


class Judged(NamedTuple):
    """A detection as it enters AP."""

    class_number: int
    score: float
    is_correct: bool


def overlaps_by_hand(gt, table) -> list[dict[int, float]]:
    """Returns the IoU of each detection with each object of its image."""
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    corners = np.c_[gt.boxes_xywh_px[:, :2], gt.boxes_xywh_px[:, :2] + gt.boxes_xywh_px[:, 2:]]
    overlaps = []
    for box, number in zip(table.boxes_xyxy_px, table.image_index):
        overlaps.append({m: reference_iou(box, corners[m]) for m in np.flatnonzero(image == number)})
    return overlaps


def finders_by_hand(gt, table, overlaps) -> dict[int, int]:
    """Returns the detection that finds each object that is found. The best detections choose first: the object of
    their class with the greatest IoU, from 0.5 on, among those that are not found yet."""
    finders = {}
    for d in np.argsort(-table.scores):
        free = {}
        for m, overlap in overlaps[d].items():
            if overlap >= 0.5 and gt.classes[m] == table.classes[d] and m not in finders:
                free[m] = overlap
        if free:
            finders[max(free, key=free.get)] = d
    return finders


def confused_by_hand(table, overlaps, finders) -> dict[int, int]:
    """Returns the object with which each confused detection is matched: pairs of a false positive and an object that
    is not found, with an IoU of at least 0.5, the greatest first."""
    pairs = []
    for d in set(range(table.scores.size)) - set(finders.values()):
        pairs += [(-overlap, -table.scores[d], d, m) for m, overlap in overlaps[d].items() if m not in finders]
    confused = {}
    for overlap, _, d, m in sorted(pairs):
        if -overlap >= 0.5 and d not in confused and m not in confused.values():
            confused[d] = m
    return confused


def kind_by_hand(same: dict[int, float], other: dict[int, float], finders: dict[int, int]) -> tuple[str, int | None]:
    """Returns the kind of a false positive that is not confused, and the object that it would find if it were
    corrected.

    ``same`` and ``other`` are the IoUs with the objects of its class and of other classes.
    """
    best_same = max(same.values(), default=0)
    best_other = max(other.values(), default=0)
    not_found = {m: overlap for m, overlap in same.items() if m not in finders and overlap >= 0.1}
    if best_same < 0.5 and not_found:
        return "location", max(not_found, key=not_found.get)
    if best_other >= 0.5:
        return "class", max(other, key=other.get)
    if best_same >= 0.5:
        return "duplicate", None
    if any(overlap >= 0.1 for m, overlap in other.items() if m not in finders):
        return "both", None
    return "background", None


def mean_ap_by_hand(gt, judged: list[Judged], found=()) -> float:
    """Returns the mean AP of the classes if the objects ``found`` were detected too, with a score above all others."""
    judged = [*judged, *(Judged(gt.classes[m], 2.0, True) for m in found)]
    values = []
    for c in np.unique(gt.classes):
        of_class = [(one.score, one.is_correct) for one in judged if one.class_number == c]
        values.append(average_precision(of_class, int((gt.classes == c).sum())))
    return np.mean(values)


def corrections_by_hand(table, goals: dict[int, int], finders: dict[int, int]) -> dict[int, int]:
    """Returns the object that each corrected detection finds: of those with one goal, the best detection, and none if
    the object is found already."""
    corrected = {}
    for d in sorted(goals, key=lambda d: -table.scores[d]):
        if goals[d] not in finders and goals[d] not in corrected.values():
            corrected[d] = goals[d]
    return corrected


def by_hand(gt, table, num_classes) -> SplitErrors:
    """Splits the errors by the definitions, one detection and one object at a time; without crowd, and with distinct
    objects and scores."""
    overlaps = overlaps_by_hand(gt, table)
    finders = finders_by_hand(gt, table, overlaps)
    confused = confused_by_hand(table, overlaps, finders)
    kinds = dict.fromkeys(confused, "class")
    goals = dict(confused)
    for d in set(range(table.scores.size)) - set(finders.values()) - set(confused):
        same = {m: overlap for m, overlap in overlaps[d].items() if gt.classes[m] == table.classes[d]}
        other = {m: overlap for m, overlap in overlaps[d].items() if m not in same}
        kinds[d], goal = kind_by_hand(same, other, finders)
        if goal is not None:
            goals[d] = goal
    not_found = set(range(gt.classes.size)) - set(finders)
    missed = not_found - set(goals.values())

    counts = np.zeros((num_classes, len(KINDS)), dtype=int)
    for d, kind in kinds.items():
        counts[table.classes[d], KINDS.index(kind)] += 1
    for m in missed:
        counts[gt.classes[m], KINDS.index("missed")] += 1

    judged = [Judged(table.classes[d], table.scores[d], d not in kinds) for d in range(table.scores.size)]
    ap = mean_ap_by_hand(gt, judged)
    cost = []
    for kind in KINDS[:-1]:
        goals_of_kind = {d: goal for d, goal in goals.items() if kinds[d] == kind}
        corrected = corrections_by_hand(table, goals_of_kind, finders)
        mended = [one for d, one in enumerate(judged) if kinds.get(d) != kind]
        mended += [Judged(gt.classes[goal], table.scores[d], True) for d, goal in corrected.items()]
        cost.append(mean_ap_by_hand(gt, mended) - ap)
    cost.append(mean_ap_by_hand(gt, judged, found=missed) - ap)
    return SplitErrors(
        counts=counts,
        ap=ap,
        cost=cost,
        false_positive_cost=mean_ap_by_hand(gt, [one for one in judged if one.is_correct]) - ap,
        false_negative_cost=mean_ap_by_hand(gt, judged, found=not_found) - ap,
    )


def distinct_case(seed):
    """Returns few detections with distinct scores on distinct objects; classes are often wrong, boxes misplaced."""
    gt, table, num_classes = random_case(seed, num_images=6, crowd_share=0, per_image=60, rounding=9)
    rng = np.random.default_rng(seed)
    gt = dataclasses.replace(gt, boxes_xywh_px=gt.boxes_xywh_px + rng.uniform(0, 0.3, gt.boxes_xywh_px.shape))
    table = table.take(np.flatnonzero(rng.random(table.scores.size) < 0.6))
    count = table.scores.size
    shift = np.where(rng.random(count) < 0.5, 0.5, 0) * (table.boxes_xyxy_px[:, 2] - table.boxes_xyxy_px[:, 0])
    return (
        gt,
        dataclasses.replace(
            table,
            boxes_xyxy_px=table.boxes_xyxy_px + shift[:, None] * [1, 0, 1, 0],
            scores=rng.permutation(count) / count,
            classes=np.where(rng.random(count) < 0.2, rng.integers(0, num_classes, count), table.classes),
        ),
        num_classes,
    )


@pytest.mark.parametrize("seed", range(6))
def test_error_types_equal_a_loop_over_the_definitions(seed):
    gt, table, num_classes = distinct_case(seed)
    split = split_errors(match_detections(gt, table, num_classes))
    expected = by_hand(gt, table, num_classes)
    np.testing.assert_array_equal(split.counts, expected.counts)
    assert (expected.counts.sum(0) > 0).all()  # every kind occurs
    assert split.ap == pytest.approx(expected.ap, abs=1e-12)
    np.testing.assert_allclose(split.cost, expected.cost, atol=1e-12)
    assert split.false_positive_cost == pytest.approx(expected.false_positive_cost, abs=1e-12)
    assert split.false_negative_cost == pytest.approx(expected.false_negative_cost, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_ap_and_ar_by_size_equal_pycocotools(seed):
    gt, table, num_classes = random_case(seed, crowd_share=(0, 0.15, 0.6)[seed % 3], rounding=2)
    stats, precision = coco_evaluate(gt, table)
    result, sizes, _, _ = score_detections(gt, table, num_classes)
    expected = precision.mean((0, 1))  # (C, A); -1 where there is no object
    np.testing.assert_allclose(np.where(np.isnan(sizes.ap), -1, sizes.ap), expected, atol=1e-12)
    for t, ours in ((0, sizes.ap50), (5, sizes.ap75)):
        np.testing.assert_allclose(np.where(np.isnan(ours), -1, ours), precision[t].mean(0), atol=1e-12)
    rows = {(name, size): scores for name, size, _, scores in size_rows(sizes, list("abcd"))}
    means = np.array([rows["all", size] for size in SIZES])
    np.testing.assert_allclose(np.nan_to_num(means[:, 2], nan=-1), stats[[0, 3, 4, 5]], atol=1e-12)
    np.testing.assert_allclose(np.nan_to_num(means[:, 3], nan=-1), stats[[8, 9, 10, 11]], atol=1e-12)
    assert len(rows) == 4 * (num_classes + 1)
    np.testing.assert_array_equal(sizes.targets[:, 0], result.class_targets)


def test_the_error_of_ap_is_its_deviation_over_other_images():
    """Reference: the deviation of AP over 40 validation sets of 60 images that are drawn alike."""
    ap = []
    estimates = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        image = np.repeat(np.arange(60), 2)
        boxes = np.tile([[10.0, 10, 100, 100], [200, 200, 100, 100]], (60, 1))
        gt = make_ground_truth(
            boxes, classes=rng.integers(0, 2, 120), area=boxes[:, 2:].prod(1), image=image, num_images=60, num_classes=2
        )
        is_hard = np.repeat(rng.random(60) < 0.3, 2)  # the objects of an image are alike
        found = rng.random(120) < np.where(is_hard, 0.3, 0.9)
        noisy = xywh_to_xyxy(boxes[found] + rng.normal(0, 8, (int(found.sum()), 4)))
        table = make_table(
            image=image[found], boxes=noisy, scores=rng.random(int(found.sum())), classes=gt.classes[found]
        )
        ap.append(score_detections(gt, table, 2).result.ap)
        estimates.append(ap_error(match_detections(gt, table, 2)))
    assert np.mean(estimates) == pytest.approx(np.std(ap), rel=0.3)
    few = make_ground_truth(
        boxes[:4], classes=np.zeros(4), area=np.ones(4), image=np.arange(4), num_images=4, num_classes=1
    )
    assert np.isnan(ap_error(match_detections(few, make_table(), 1)))
