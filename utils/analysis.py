"""What detections tell beyond their scores: how errors divide, what confidences are worth, and AP by size.

Made once, at the end of val.py, from boxes that are already gathered; validation in training leaves it out.
"""

from __future__ import annotations

from typing import NamedTuple

from utils.calibration import Calibration, measure_calibration
from utils.error_split import ErrorSplit, split_errors
from utils.size_scores import SizeScores, score_sizes
from utils.structures import DetectionTable, GroundTruth
from utils.verdicts import judge, sort_by_class


class Analysis(NamedTuple):
    errors: ErrorSplit
    calibration: Calibration
    sizes: SizeScores | None  # only where asked for


def analyse(
    gt: GroundTruth, table: DetectionTable, num_classes: int, *, threshold: float, per_size: bool = False
) -> Analysis:
    """``threshold`` is the confidence from which on detections are shown to a user."""
    judgement = judge(gt, table, num_classes)
    return Analysis(
        errors=split_errors(judgement),
        calibration=measure_calibration(sort_by_class(judgement), threshold),
        sizes=score_sizes(judgement) if per_size else None,
    )
