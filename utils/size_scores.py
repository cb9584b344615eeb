"""Scores by the size of the objects: AP and AR within COCO's area ranges, for each class.

Legend: C classes, A area ranges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.matching import AREA_RANGES, IOU_THRESHOLDS
from utils.metrics import interpolated_precision, mean_known
from utils.verdicts import Judgement, sort_by_class

SIZES = ("all", "small", "medium", "large")


class SizeScores(NamedTuple):
    """Of each class and size; nan where there is no object."""

    targets: np.ndarray  # int64 (C, A)
    ap: np.ndarray  # float64 (C, A) IoU 0.50:0.95
    ap50: np.ndarray  # float64 (C, A)
    ap75: np.ndarray  # float64 (C, A)
    recall: np.ndarray  # float64 (C, A) COCO's AR: of all detections that count, mean over IoU 0.50:0.95


def score_sizes(judgement: Judgement) -> SizeScores:
    """COCO's scores at its four sizes. Means over the classes that have objects are those of pycocotools."""
    verdicts, targets = sort_by_class(judgement), judgement.targets()
    precision = interpolated_precision(verdicts, targets)
    found = np.zeros((*targets.shape, IOU_THRESHOLDS.size), dtype=np.int64)
    np.add.at(found, verdicts.classes[verdicts.contender], verdicts.right)
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


def size_limits() -> dict[str, tuple[float, float]]:
    """Areas in pixels from and up to which an object has a size."""
    return {name: (float(low), float(high)) for name, (low, high) in zip(SIZES, AREA_RANGES)}
