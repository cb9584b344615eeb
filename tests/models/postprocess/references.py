"""References for non-maximum suppression, and boxes to compare with them."""

from __future__ import annotations

import numpy as np
import torch

from tests.helpers.scoring import reference_iou


def brute_force(boxes, scores, *, conf_thres, iou_thres, max_det, agnostic=False, multi_label=True, classes=None):
    """Returns (score, class, box index) of the kept boxes of one image, by a greedy loop in float64."""
    boxes = boxes.double().tolist()
    scores = scores.tolist()
    candidates = []
    for n, row in enumerate(scores):
        labels = range(len(row)) if multi_label else [int(np.argmax(row))]
        candidates += [(row[c], n, c) for c in labels if row[c] > conf_thres and (classes is None or c in classes)]
    candidates.sort(key=lambda x: (-x[0], x[1], x[2]))
    kept = []
    for score, n, c in candidates:
        rivals = [other for _, other_c, other in kept if agnostic or other_c == c]
        if not any(reference_iou(boxes[n], boxes[other]) > iou_thres for other in rivals):
            kept.append((score, c, n))
    return kept[:max_det]


def several_boxes_per_object(batch, count, num_classes, seed):
    """Draws several boxes of each of 12 objects, some of which overlap: (B, N, 4), and scores (B, N, C)."""
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, 12, count)
    center = rng.uniform(50, 270, (batch, 12, 2))[:, owner]
    half = rng.uniform(8, 60, (batch, 12, 2))[:, owner]
    center = center + half * rng.normal(0, 0.1, (batch, count, 2))
    half = half * rng.uniform(0.85, 1.2, (batch, count, 2))
    boxes = torch.from_numpy(np.concatenate((center - half, center + half), -1)).float()
    return boxes, torch.from_numpy(rng.uniform(0, 1, (batch, count, num_classes))).float()
