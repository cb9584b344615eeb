"""Checks of boxes and classes that need no image: nearly equal boxes, sizes, and the distribution of classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from data.box_sizes import SMALL_PX, median_side, remedy_for_small_boxes
from data.check.issues import (
    DOUBLED,
    IMBALANCE,
    NOT_TRAINED,
    SMALL_OBJECTS,
    TINY,
    TWO_CLASSES,
    UNUSED,
    Issue,
)
from data.check.scanned import CheckedSplit

SAME_IOU = 0.9  # boxes that overlap by more are about the same object
TINY_PX = 3.0  # longer side at imgsz; less than half a cell of the finest level (stride 8)
SIZE_STEP = 32  # suggested sizes are multiples of the largest stride
MIN_RATIO, MIN_DEVIATIONS = 2.0, 4.0  # of a class's frequency in two splits: how different, how significant


def neighbors_in_runs(keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All pairs of positions (a, b), a < b, with equal keys, in chunks of equal distance b - a.

    Args:
        keys: (N,), equal keys adjacent.
    """
    if not len(keys):
        return
    start = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    end = np.repeat(np.r_[start[1:], len(keys)], np.diff(np.r_[start, len(keys)]))
    first, distance = np.arange(len(keys)), 1
    while (first := first[first + distance < end[first]]).size:
        yield first, first + distance
        distance += 1


def box_pairs(split: CheckedSplit) -> list[Issue]:
    """Pairs of boxes of an image with an IoU above `SAME_IOU`. Crowd regions, and repetitions, which the scan reports,
    are left out."""
    index = split.index
    rows = np.flatnonzero(~index.crowd & ~index.repeated)
    image = index.image_of_box[rows]
    x, y, w, h = index.boxes_xywh_px[rows].T
    issues = []
    for a, b in neighbors_in_runs(image):
        width = np.minimum(x[a] + w[a], x[b] + w[b]) - np.maximum(x[a], x[b])
        height = np.minimum(y[a] + h[a], y[b] + h[b]) - np.maximum(y[a], y[b])
        overlap = np.maximum(width, 0) * np.maximum(height, 0)
        iou = overlap / (w[a] * h[a] + w[b] * h[b] - overlap)
        for i in np.flatnonzero(iou > SAME_IOU).tolist():
            issues.append(_pair(split, int(rows[a[i]]), int(rows[b[i]]), float(iou[i])))
    return sorted(issues, key=lambda issue: (issue.kind, issue.images, issue.boxes[0].number))


def _pair(split: CheckedSplit, first: int, second: int, iou: float) -> Issue:
    names = [split.index.names[split.index.classes[row]] for row in (first, second)]
    box = split.box(first)
    earlier = box.where or f"box {box.number}"
    if names[0] == names[1]:
        return split.issue(DOUBLED, f"{names[1]}, IoU {iou:.2f} with {earlier}", (first, second))
    return split.issue(TWO_CLASSES, f"{names[1]}, IoU {iou:.2f} with {names[0]} in {earlier}", (first, second))


def box_sizes(splits: Sequence[CheckedSplit], imgsz: int) -> list[Issue]:
    """Boxes that are tiny at ``imgsz``, and whether half of all objects are small."""
    issues, all_sizes = [], []
    for split in splits:
        sizes, rows = split.index.sides_at(imgsz), np.flatnonzero(~split.index.crowd)
        all_sizes.append(np.sqrt(sizes.prod(1)))
        for i in np.flatnonzero(sizes.max(1, initial=0) < TINY_PX).tolist():
            w, h = sizes[i]
            issues.append(split.issue(TINY, f"{w:.1f}x{h:.1f} px at --imgsz {imgsz}", (int(rows[i]),)))
    median = median_side(np.concatenate(all_sizes))
    if remedy := remedy_for_small_boxes(median, imgsz, SIZE_STEP):
        text = f"the median object has {median:.3g} px (square root of its area) at --imgsz {imgsz}"
        issues.append(Issue(SMALL_OBJECTS, f"{text}, fewer than {SMALL_PX:.0f} px: {remedy}"))
    return issues


def class_use(splits: Sequence[CheckedSplit]) -> list[Issue]:
    """Classes without a box, and classes whose frequency differs between the training split and another one.

    The frequency is the fraction of images with an object of the class, since objects of one image are not independent.
    It differs if one is more than `MIN_RATIO` times the other and the two-proportion z-test gives `MIN_DEVIATIONS`.
    """
    names = splits[0].index.names
    boxes = np.array([s.index.boxes_of_classes(len(names)) for s in splits])
    images = np.array([s.index.images_of_classes(len(names)) for s in splits])
    issues = [
        Issue(UNUSED, f"'{names[c]}' (class {c}) has no box in {', '.join(s.name for s in splits)}")
        for c in np.flatnonzero(boxes.sum(0) == 0)
    ]
    train = next((i for i, s in enumerate(splits) if s.name == "train"), None)
    if train is None:
        return issues
    for i, split in enumerate(splits):
        if i == train:
            continue
        for c in np.flatnonzero(boxes.sum(0)).tolist():
            text = f"'{names[c]}': {boxes[train, c]:,} boxes in {images[train, c]:,} of {len(splits[train].index):,} "
            text += f"images of train, {boxes[i, c]:,} in {images[i, c]:,} of {len(split.index):,} of {split.name}"
            if boxes[train, c] == 0 and boxes[i, c]:
                issues.append(Issue(NOT_TRAINED, text, split.name))
            elif _differ(images[train, c], len(splits[train].index), images[i, c], len(split.index)):
                issues.append(Issue(IMBALANCE, text, split.name))
    return issues


def _differ(count_a: int, total_a: int, count_b: int, total_b: int) -> bool:
    if not total_a or not total_b:
        return False
    a, b = count_a / total_a, count_b / total_b
    pooled = (count_a + count_b) / (total_a + total_b)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / total_a + 1 / total_b))
    return max(a, b) > MIN_RATIO * min(a, b) and abs(a - b) > MIN_DEVIATIONS * deviation
