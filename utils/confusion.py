"""The confusion matrix of a detector: what was taken for what, what was missed, what was made up."""

from __future__ import annotations

import numpy as np

from utils.matching import Objects, Pairs, match_by_overlap, overlapping_pairs
from utils.structures import DetectionTable, GroundTruth

CONFIDENCE = 0.25
IOU = 0.45


def confusion_matrix(
    gt: GroundTruth,
    table: DetectionTable,
    num_classes: int,
    *,
    confidence: float = CONFIDENCE,
    iou: float = IOU,
) -> np.ndarray:
    """Counts by predicted and true class, matched without regard to class, larger IoU first, then larger score.

    The sum of a column is the number of objects of that class (crowd left out); the sum of a row is the number of
    detections of that class at or above ``confidence``, less those that match no object and lie in a crowd region of
    their class, which are neither right nor wrong.

    Returns:
        int64 (C + 1, C + 1): rows predicted, columns true, the last of each is background.
    """
    rows = np.flatnonzero(table.scores >= confidence)
    rows = rows[np.argsort(table.image_index[rows], kind="stable")]
    image, boxes = table.image_index[rows], table.boxes_xyxy_px[rows]
    predicted, scores = table.classes[rows], table.scores[rows]
    gt_image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    plain, crowd = ~gt.crowd, gt.crowd

    pairs = _all_pairs(image, boxes, Objects(gt_image[plain], gt.boxes_xywh_px[plain], crowd[plain]), iou)
    match = match_by_overlap(pairs, scores[pairs.detection], rows.size, int(plain.sum()))

    pairs = _all_pairs(image, boxes, Objects(gt_image[crowd], gt.boxes_xywh_px[crowd], crowd[crowd]), iou)
    same_class = predicted[pairs.detection] == gt.classes[crowd][pairs.target]
    in_crowd = np.zeros(rows.size, dtype=bool)
    in_crowd[pairs.detection[same_class]] = True

    hit = match >= 0
    true = gt.classes[plain]
    missed = np.ones(true.size, dtype=bool)
    missed[match[hit]] = False
    counted = hit | ~in_crowd
    row = np.r_[predicted[counted], np.full(missed.sum(), num_classes)]
    column = np.r_[np.where(hit, np.r_[true, num_classes][match], num_classes)[counted], true[missed]]
    size = num_classes + 1
    return np.bincount(row * size + column, minlength=size * size).astype(np.int64).reshape(size, size)


def _all_pairs(image: np.ndarray, boxes: np.ndarray, objects: Objects, iou: float) -> Pairs:
    chunks = list(overlapping_pairs(image, boxes, objects, iou))
    if not chunks:
        nothing = np.zeros(0, dtype=np.int64)
        return Pairs(nothing, nothing, np.zeros(0))
    return Pairs(*(np.concatenate(parts) for parts in zip(*chunks)))
