"""Reports odd boxes: pairs that nearly coincide, boxes that are tiny at the training size, and mostly small objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.report.issues import CheckedSplit, Issue
from engine.report.summary import small_boxes
from tools.check.issue_kinds import DOUBLED, SMALL_OBJECTS, TINY, TWO_CLASSES

SAME_IOU = 0.9  # boxes with a higher IoU count as the same object
MAX_PARTNERS = 2  # earlier boxes that a box is paired with, in its class and in other classes
TINY_PX = 3.0  # longer side at imgsz: less than half a cell of the finest level (stride 8)
SIZE_STEP = 32  # suggested sizes are multiples of the largest stride
_BOXES_AT_ONCE = 256  # compared with the earlier boxes of their image


def box_pairs(split: CheckedSplit) -> list[Issue]:
    """Returns pairs of boxes of an image with an IoU above `SAME_IOU`, except crowd regions and exact repetitions.

    A box is paired with only a few earlier boxes, because n copies would form n * n / 2 pairs.
    """
    index = split.index
    is_compared = ~index.crowd & ~index.repeated
    issues = []
    for image in range(len(index)):
        first, stop = index.offsets[image : image + 2].tolist()
        rows = first + np.flatnonzero(is_compared[first:stop])
        classes = index.classes[rows]
        for start in range(0, len(rows), _BOXES_AT_ONCE):
            chunk = slice(start, start + _BOXES_AT_ONCE)
            iou = _iou(index.boxes_xywh_px[rows[chunk]], index.boxes_xywh_px[rows])
            is_same = np.tril(iou > SAME_IOU, start - 1)  # with an earlier box
            is_same_class = classes[chunk, None] == classes
            for kind, pairs in ((DOUBLED, is_same & is_same_class), (TWO_CLASSES, is_same & ~is_same_class)):
                for i, j in np.argwhere(pairs & (pairs.cumsum(1) <= MAX_PARTNERS)).tolist():
                    earlier = split.box(int(rows[j]))
                    later = split.box(int(rows[start + i]))
                    partner = earlier.where or f"box {earlier.number}"
                    if kind == TWO_CLASSES:
                        partner = f"{earlier.class_name} in {partner}"
                    text = f"{later.class_name}, IoU {iou[i, j]:.2f} with {partner}"
                    issues.append(split.issue_of(kind, text, image, (earlier, later)))
    return sorted(issues, key=lambda issue: issue.kind)


def _iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the IoU of boxes (n, 4) and (m, 4), x, y, width and height: float64 (n, m)."""
    low = np.maximum(a[:, None, :2], b[:, :2])
    high = np.minimum((a[:, :2] + a[:, 2:])[:, None], b[:, :2] + b[:, 2:])
    overlap = (high - low).clip(0).prod(2)
    return overlap / (a[:, 2:].prod(1)[:, None] + b[:, 2:].prod(1) - overlap)


def box_sizes(splits: Sequence[CheckedSplit], imgsz: int) -> list[Issue]:
    """Reports boxes that are tiny at ``imgsz``, and whether half of the objects of the first split are small."""
    issues = []
    for split in splits:
        sizes = split.index.sides_at(imgsz)
        rows = np.flatnonzero(~split.index.crowd)
        for i in np.flatnonzero(sizes.max(1, initial=0) < TINY_PX).tolist():
            w, h = sizes[i]
            issues.append(split.issue(TINY, f"{w:.1f}x{h:.1f} px at --imgsz {imgsz}", (int(rows[i]),)))
    small = small_boxes(splits[0].index, imgsz=imgsz, stride=SIZE_STEP)
    if small:
        issues.append(Issue(SMALL_OBJECTS, small, splits[0].name))
    return issues
