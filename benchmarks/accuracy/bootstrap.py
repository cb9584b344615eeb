"""AP on resampled images, which shows how much of a difference between two detectors may be chance.

The bootstrap (Efron 1979) draws as many images as there are, with replacement, many times. Both detectors are scored on
the same draws, so the difficulty that an image has for both cancels. Detections are matched to objects once: an image
drawn twice counts twice, with the same outcomes. The AP of a draw equals the AP that COCO's evaluation gives for a data
set in which the drawn images are repeated, unless detections of one class in one image have equal scores (there COCO
ranks all detections of the first copy before the second copy's).

Legend: S draws, N images, D detections, C classes, T IoU thresholds, R recall points.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import ALL_SIZES, match_detections, sort_by_class
from engine.evaluation.metrics import RECALL_POINTS
from utils.detections import DetectionTable
from utils.labels import GroundTruth

_CELLS = 1 << 22  # draws times detections computed at a time; bounds the memory at some 200 MB


class ClassOutcomes(NamedTuple):
    """The detections of one class, best first, at COCO's IoU thresholds.

    A detection is ignored if it matches an object that does not count, such as a crowd region; otherwise it is a true
    or a false positive. Most are false positives at all thresholds, or ignored at all of them; for these ``counted``
    suffices. The n others have an outcome for each threshold.
    """

    image: np.ndarray  # int64 (D,)
    counted: np.ndarray  # bool (D,), not ignored at some threshold
    matching: np.ndarray  # int64 (n,), rows of the others, ascending; each matches an object at some threshold
    true_positive: np.ndarray  # bool (n, T)
    ignored: np.ndarray  # bool (n, T)
    targets: np.ndarray  # int64 (N,), objects in each image


def class_outcomes(gt: GroundTruth, table: DetectionTable, num_classes: int) -> list[ClassOutcomes]:
    """Returns the outcomes of each class, from which the AP of any draw of images follows.

    Images are numbered in the order of their ids, as COCO's evaluation sorts them.
    """
    matches = match_detections(gt, table, num_classes)
    outcomes = sort_by_class(matches)
    image = matches.ranked.group[matches.by_class] // num_classes
    is_target = ~matches.ignored[:, ALL_SIZES]
    object_image = matches.objects.group // num_classes
    result = []
    for c, rows in enumerate(outcomes.of_classes(num_classes)):
        targets = object_image[is_target & (matches.object_classes == c)]
        result.append(
            _outcomes_of_class(
                image[rows],
                outcomes.true_positive[rows, ALL_SIZES],
                outcomes.false_positive[rows, ALL_SIZES],
                targets=np.bincount(targets, minlength=gt.num_images),
            )
        )
    return result


def _outcomes_of_class(
    image: np.ndarray, true_positive: np.ndarray, false_positive: np.ndarray, *, targets: np.ndarray
) -> ClassOutcomes:
    """Finds the detections of a class whose outcome depends on the object that they match.

    Args:
        image: int64 (D,), of each detection of the class.
        true_positive, false_positive: bool (D, T).
        targets: int64 (N,), objects of the class in each image.
    """
    counts = true_positive | false_positive
    is_counted = counts.any(axis=1)
    # Detections that are ignored at some thresholds, but not at all, match an object that does not count.
    matching = np.flatnonzero(true_positive.any(axis=1) | (is_counted & ~counts.all(axis=1)))
    return ClassOutcomes(
        image=image,
        counted=is_counted,
        matching=matching,
        true_positive=true_positive[matching],
        ignored=~counts[matching],
        targets=targets,
    )


def draw_images(num_images: int, draws: int, seed: int = 0) -> np.ndarray:
    """Draws N images, with replacement, ``draws`` times. Returns how often each is drawn: int64 (S, N)."""
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.multinomial(num_images, np.full(num_images, 1 / num_images), size=draws)


def resampled_ap(outcomes: list[ClassOutcomes], draw_counts: np.ndarray) -> np.ndarray:
    """Computes AP at IoU 0.50:0.95 of each class on each draw: float64 (S, C), nan where a draw has no object of the
    class.

    ``draw_counts``: int64 (S, N), how often each image is drawn, images in the order of their ids.
    """
    return np.stack([_class_ap(of_class, draw_counts) for of_class in outcomes], axis=1)


def _class_ap(outcomes: ClassOutcomes, draw_counts: np.ndarray) -> np.ndarray:
    """Computes the AP of one class on each draw: float64 (S,)."""
    targets = draw_counts @ outcomes.targets
    ap = np.zeros(len(draw_counts))
    if outcomes.matching.size:
        draw_counts = draw_counts.astype(np.int32)
        step = max(_CELLS // len(outcomes.image), 1)
        for start in range(0, len(draw_counts), step):
            chunk = slice(start, start + step)
            ap[chunk] = _ap_of_draws(outcomes, draw_counts[chunk], targets[chunk])
    return np.where(targets > 0, ap, np.nan)


def _ap_of_draws(outcomes: ClassOutcomes, draw_counts: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Computes the AP of draws with ``targets`` (S,) objects: float64 (S,), undefined where there are none.

    A detection counts as often as its image is drawn.
    """
    weight = draw_counts[:, outcomes.image]
    num_detections = np.cumsum(weight * outcomes.counted, axis=1, dtype=np.int32)[:, outcomes.matching]
    weight = weight[:, outcomes.matching]
    required_tp = _counts_at_recall(targets)
    total = np.zeros(len(draw_counts))
    for true_positive, ignored in zip(outcomes.true_positive.T, outcomes.ignored.T):
        if true_positive.any():
            not_ignored = num_detections
            if ignored.any():
                not_ignored = num_detections - np.cumsum(weight * ignored, axis=1)
            # The envelope of precision and the recall change at true positives only.
            tp = np.cumsum(weight[:, true_positive], axis=1)
            total += _interpolated_ap(tp, not_ignored[:, true_positive], required_tp)
    return total / outcomes.true_positive.shape[1]


def _interpolated_ap(tp: np.ndarray, detections: np.ndarray, required_tp: np.ndarray) -> np.ndarray:
    """Computes AP at one IoU threshold: float64 (S,).

    Args:
        tp: (S, n), true positives up to each of n detections.
        detections: (S, n), all detections up to there.
        required_tp: result of `_counts_at_recall`.
    """
    precision = tp / np.maximum(detections, 1)
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    return _at_counts(tp, envelope, required_tp).mean(axis=1)


def _counts_at_recall(targets: np.ndarray) -> np.ndarray:
    """Returns the smallest number of true positives with which the recall, compared in floating point as COCO does,
    reaches each recall point: int64 (S, R)."""
    objects = np.maximum(targets, 1)[:, None]
    counts = np.ceil(RECALL_POINTS * objects).astype(np.int64)
    counts -= (counts - 1) / objects >= RECALL_POINTS
    return counts + (counts / objects < RECALL_POINTS)


def _at_counts(tp: np.ndarray, envelope: np.ndarray, required_tp: np.ndarray) -> np.ndarray:
    """Looks up ``envelope`` (S, n) where ``tp`` (S, n) first reaches ``required_tp`` (S, R): (S, R), 0 where it never
    does.

    One search serves all draws: the counts of each draw are raised above all counts of the previous draws. For example,
    three draws with counts up to 3 are raised by 0, 4 and 8:

        tp      raised    required_tp  raised  position in all  position in the draw
        1 2 3   1 2 3     2            2       1                1
        0 1 1   4 5 5     1            5       4                1
        0 0 2   8 8 10    3            11      9                3, which does not exist: never reached
    """
    rows, length = tp.shape
    draw = np.arange(rows)[:, None]
    raised_by = draw * (max(int(tp.max()), int(required_tp.max())) + 1)
    first = np.searchsorted((tp + raised_by).ravel(), (required_tp + raised_by).ravel()).reshape(rows, -1)
    first -= draw * length
    values = np.take_along_axis(envelope, np.minimum(first, length - 1), axis=1)
    return np.where(required_tp <= tp[:, -1:], values, 0.0)
