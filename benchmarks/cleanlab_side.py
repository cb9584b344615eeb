"""Runs in an environment with cleanlab, not in this program's: ranks labels by cleanlab's object detection scores.
`label_errors.py` calls it and compares.

    PEER/bin/python benchmarks/cleanlab_side.py IN.json OUT.json [HIGH_PROBABILITY]

IN has, per image, labeled boxes and classes, and detections; OUT a list of [score, image, label or -1, detection or
-1], the lowest score, and so the most probable error, first.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from cleanlab.object_detection.rank import (
    compute_badloc_box_scores,
    compute_overlooked_box_scores,
    compute_swap_box_scores,
)


def rank(images: list[dict], num_classes: int, high: float | None) -> list[list]:
    labels = [
        {"bboxes": np.array(image["boxes"], float).reshape(-1, 4), "labels": np.array(image["classes"], int)}
        for image in images
    ]
    predictions, order = [], []
    for image in images:
        boxes = np.array(image["detections"], float).reshape(-1, 6)  # x1, y1, x2, y2, score, class
        by_class = np.empty(num_classes, object)
        numbers = []
        for c in range(num_classes):
            rows = np.flatnonzero(boxes[:, 5] == c)
            by_class[c] = boxes[rows, :5]
            numbers += rows.tolist()
        predictions.append(by_class)
        order.append(numbers)
    common = {"labels": labels, "predictions": predictions}
    swap = compute_swap_box_scores(**common, high_probability_threshold=high)
    badloc = compute_badloc_box_scores(**common)
    overlooked = compute_overlooked_box_scores(**common, high_probability_threshold=high)
    ranked = []
    for i in range(len(images)):
        ranked += [[float(s), i, row, -1] for row, s in enumerate(np.minimum(swap[i], badloc[i])) if not np.isnan(s)]
        ranked += [[float(s), i, -1, order[i][n]] for n, s in enumerate(overlooked[i]) if not np.isnan(s)]
    return sorted(ranked)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        content = json.load(file)
    result = rank(content["images"], content["classes"], float(sys.argv[3]) if len(sys.argv) > 3 else None)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file)
