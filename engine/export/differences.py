"""Differences between the detections of two models in the same images.

Detections are matched by image and class. Low scores are left out: at the threshold of NMS, a rounding error decides
which of two boxes is kept, and among low scores there are thousands of such pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.evaluation.matching import Objects, match_by_overlap, overlapping_pairs
from engine.inference.model import InferenceModel
from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable

MATCHED_SCORE = 0.05  # detections of lower scores are not matched


class Differences(NamedTuple):
    """Detections of two models: P pairs, and Q detections of either model that the other lacks."""

    image: np.ndarray  # int64 (P,)
    box: np.ndarray  # float64 (P,) largest difference of a side, as a fraction of the longer side of the box
    score: np.ndarray  # float64 (P,) difference
    missing: np.ndarray  # int64 (Q,) images


def match_tables(first: DetectionTable, second: DetectionTable, min_iou: float) -> Differences:
    """Pairs detections of two models that have the same image and class, the best IoU first.

    A detection counts as missing if its score is clearly above `MATCHED_SCORE`, so that rounding does not decide.
    """
    num_classes = 1 + max(int(table.classes.max(initial=0)) for table in (first, second))
    first = _candidates(first, num_classes)
    second = _candidates(second, num_classes)
    partner = _partners(first, second, num_classes, min_iou)
    is_paired = partner >= 0
    is_second_paired = np.zeros(len(second.scores), bool)
    is_second_paired[partner[is_paired]] = True

    paired_first = first.take(is_paired)
    paired_second = second.take(partner[is_paired])
    is_compared = np.maximum(paired_first.scores, paired_second.scores) > MATCHED_SCORE
    one = paired_first.take(is_compared)
    other = paired_second.take(is_compared)
    longer_side = (one.boxes_xyxy_px[:, 2:] - one.boxes_xyxy_px[:, :2]).max(1, initial=0)
    largest = np.abs(one.boxes_xyxy_px - other.boxes_xyxy_px).max(1, initial=0)
    is_missing_in_second = ~is_paired & (first.scores > MATCHED_SCORE)
    is_missing_in_first = ~is_second_paired & (second.scores > MATCHED_SCORE)
    return Differences(
        image=one.image_index,
        box=largest / np.maximum(longer_side, 1),
        score=np.abs(one.scores - other.scores),
        missing=np.r_[first.image_index[is_missing_in_second], second.image_index[is_missing_in_first]],
    )


def _groups(table: DetectionTable, num_classes: int) -> np.ndarray:
    """Returns a number for the image and class of each detection: int64 (D,)."""
    return table.image_index * num_classes + table.classes


def _candidates(table: DetectionTable, num_classes: int) -> DetectionTable:
    """Selects the detections that may be partners, sorted by image and class. Half of `MATCHED_SCORE` is enough for a
    partner, because scores may differ a little."""
    table = table.take(table.scores > MATCHED_SCORE / 2)
    return table.take(np.argsort(_groups(table, num_classes), kind="stable"))


def _partners(first: DetectionTable, second: DetectionTable, num_classes: int, min_iou: float) -> np.ndarray:
    """Returns the row in ``second`` of each detection's partner, -1 without one: int64 (D,). Equal overlaps are ranked
    by how alike the scores are."""
    groups = _groups(second, num_classes)
    objects = Objects(groups, xyxy_to_xywh(second.boxes_xyxy_px), crowd=np.zeros(len(second.scores), bool))
    pairs = overlapping_pairs(_groups(first, num_classes), first.boxes_xyxy_px, objects, min_iou)
    alike = -np.abs(first.scores[pairs.detection] - second.scores[pairs.target])
    return match_by_overlap(pairs, alike, len(first.scores), len(second.scores))


@torch.no_grad()
def largest_difference(model: InferenceModel, exported: InferenceModel, images: Tensor) -> tuple[float, float]:
    """Compares the boxes of two models that return them in the same order, on ``images`` float32 (B, C, H, W).

    Returns the largest difference of a coordinate, as a fraction of the images' longer side, and of a score; nan if
    either model returns nan.
    """
    boxes, scores = model.decode(model(images))
    other_boxes, other_scores = exported.decode(exported(images))
    box = (boxes - other_boxes).abs().max().item() / max(images.shape[2:])
    return box, (scores - other_scores).abs().max().item()
