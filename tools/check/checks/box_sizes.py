"""Reports boxes that are tiny at the training size, and data sets whose objects are mostly small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.issues.issue import CheckedSplit, Issue
from engine.issues.small_boxes import SMALL_PX, median_side, remedy_for_small_boxes
from tools.check.issue_kinds import SMALL_OBJECTS, TINY

TINY_PX = 3.0  # longer side at imgsz: less than half a cell of the finest level (stride 8)
SIZE_STEP = 32  # suggested sizes are multiples of the largest stride


def box_sizes(splits: Sequence[CheckedSplit], imgsz: int) -> list[Issue]:
    """Reports boxes that are tiny at ``imgsz``, and whether half of all objects are small."""
    issues = []
    all_sides = []
    for split in splits:
        sizes = split.index.sides_at(imgsz)
        rows = np.flatnonzero(~split.index.crowd)
        all_sides.append(np.sqrt(sizes.prod(1)))
        for i in np.flatnonzero(sizes.max(1, initial=0) < TINY_PX).tolist():
            w, h = sizes[i]
            issues.append(split.issue(TINY, f"{w:.1f}x{h:.1f} px at --imgsz {imgsz}", (int(rows[i]),)))
    median = median_side(np.concatenate(all_sides))
    remedy = remedy_for_small_boxes(median, imgsz, SIZE_STEP, tile=splits[0].index.tile)
    if remedy:
        size = f"the median object has {median:.3g} px (square root of its area) at --imgsz {imgsz}"
        issues.append(Issue(SMALL_OBJECTS, f"{size}, fewer than {SMALL_PX:.0f} px: {remedy}"))
    return issues
