"""AP on resampled images, which shows how much of a difference between two detectors may be chance.

The bootstrap (Efron 1979) draws as many images as there are, with replacement, many times. Both detectors are scored on
the same draws, so the difficulty that an image has for both cancels. Detections are matched to objects once: an image
drawn twice counts twice, with the same outcomes. The AP of a draw equals the AP that COCO's evaluation gives for a data
set in which the drawn images are repeated, unless detections of one class in one image have equal scores (there COCO
ranks all detections of the first copy before the second copy's).
"""

from __future__ import annotations

import numpy as np

from engine.evaluation.matching import ALL_SIZES, DetectionOutcomes, match_detections, sort_by_class
from engine.evaluation.metrics import interpolated_precision, nanmean
from utils.detections import DetectionTable
from utils.labels import GroundTruth


def draw_images(num_images: int, draws: int, seed: int = 0) -> np.ndarray:
    """Draws N images, with replacement, S times. Returns how often each is drawn: int64 (S, N)."""
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.multinomial(num_images, np.full(num_images, 1 / num_images), size=draws)


def resampled_ap(gt: GroundTruth, table: DetectionTable, num_classes: int, draws: np.ndarray) -> np.ndarray:
    """Computes AP at IoU 0.50:0.95 of each class on each draw: float64 (S, C), nan where a draw has no object of the
    class.

    ``draws``: int64 (S, N), how often each image is drawn, images in the order of their ids.
    """
    matches = match_detections(gt, table, num_classes)
    outcomes = sort_by_class(matches)
    true_positive, false_positive = (part[:, [ALL_SIZES]] for part in (outcomes.true_positive, outcomes.false_positive))
    image = matches.ranked.group[matches.by_class] // num_classes
    counting = ~matches.ignored[:, ALL_SIZES]
    object_image = matches.objects.group[counting] // num_classes
    object_class = matches.object_classes[counting]
    ap = []
    for counts in draws:
        rows = np.repeat(np.arange(len(image)), counts[image])
        drawn = DetectionOutcomes(outcomes.classes[rows], true_positive[rows], false_positive[rows])
        targets = np.bincount(np.repeat(object_class, counts[object_image]), minlength=num_classes)
        ap.append(nanmean(interpolated_precision(drawn, targets[:, None]), axis=(1, 2, 3)))
    return np.stack(ap)
