"""Reports odd boxes: pairs that nearly coincide, tiny ones at the training size, mostly small objects; and odd classes:
without boxes, named almost like another, missing from the training split."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np

from engine.evaluation.matching import Objects, overlapping_pairs
from engine.report.advice import small_boxes
from engine.report.label_errors import CheckedSplit, Issue, IssueKind
from utils.boxes import xywh_to_xyxy
from utils.strings import counted, listed

SAME_IOU = 0.9  # boxes with a higher IoU count as the same object
TINY_PX = 3.0  # longer side at imgsz: less than half a cell of the finest level (stride 8)
SIZE_STEP = 32  # suggested sizes are multiples of the largest stride
MAX_NAMED_CLASSES = 100  # classes shown in a message
# A class may be a slip of another one that has so many times its boxes, if their names differ in so many letters.
MIN_BOXES_RATIO = 50
MAX_LETTERS = 2
DOUBLED = IssueKind(
    "doubled box", "two boxes of one class with IoU above 0.9: one object is counted twice", "delete one of the two"
)
TWO_CLASSES = IssueKind(
    "one box, two classes", "two boxes of different classes with IoU above 0.9", "delete the wrong one"
)
TINY = IssueKind(
    "tiny box",
    "too small to be found at this --imgsz",
    "delete it if it was drawn by mistake, else raise --imgsz or use tiles",
)
SMALL_OBJECTS = IssueKind(
    "small objects", "most models miss objects below two cells of their finest level", "raise --imgsz, or use tiles"
)
UNUSED = IssueKind("unused classes", "the model cannot learn these", "label some, or remove the classes from the names")
SIMILAR = IssueKind(
    "similar class names",
    "one may be a slip of the other",
    "rename the class in its labels, or merge the two: 'classes:'",
)
NOT_TRAINED = IssueKind(
    "class without training boxes",
    "the model cannot learn these, and they are scored",
    "move images of it into the training split",
)


def box_pairs(split: CheckedSplit) -> list[Issue]:
    """Returns pairs of boxes of an image with an IoU above `SAME_IOU`, except crowd regions and exact repetitions."""
    index = split.index
    rows = np.flatnonzero(~index.crowd & ~index.repeated)
    image = index.image_of_box[rows]
    boxes = index.boxes_xywh_px[rows]
    pairs = overlapping_pairs(image, xywh_to_xyxy(boxes), Objects(image, boxes, np.zeros(len(rows), bool)), SAME_IOU)
    pairs = pairs.take((pairs.target < pairs.detection) & (pairs.overlap > SAME_IOU))
    issues = []
    for i, j, iou in zip(rows[pairs.target].tolist(), rows[pairs.detection].tolist(), pairs.overlap.tolist()):
        earlier = split.box(i)
        later = split.box(j)
        partner = earlier.where or "another box"
        kind = DOUBLED
        if earlier.class_id != later.class_id:
            kind = TWO_CLASSES
            partner = f"{earlier.class_name} in {partner}"
        issues.append(split.issue(kind, f"{later.class_name}, IoU {iou:.2f} with {partner}", i, j))
    return sorted(issues, key=lambda issue: issue.kind)


def box_sizes(splits: Sequence[CheckedSplit], imgsz: int) -> list[Issue]:
    """Reports boxes that are tiny at ``imgsz``, and whether half of the objects of the first split are small."""
    issues = []
    for split in splits:
        sizes = split.index.sides_at(imgsz)
        rows = np.flatnonzero(~split.index.crowd)
        for i in np.flatnonzero(sizes.max(1, initial=0) < TINY_PX).tolist():
            w, h = sizes[i]
            issues.append(split.issue(TINY, f"{w:.1f}x{h:.1f} px at --imgsz {imgsz}", int(rows[i])))
    small, _ = small_boxes(splits[0].index, imgsz=imgsz, stride=SIZE_STEP)
    if small:
        issues.append(Issue(SMALL_OBJECTS, small, splits[0].name))
    return issues


def class_use(splits: Sequence[CheckedSplit]) -> list[Issue]:
    """Reports the classes without a box, in one issue, each rare class that is called almost like a frequent one, and
    each class of another split that the training split lacks."""
    names = splits[0].index.names
    boxes_of = {split.name: split.index.boxes_per_class(len(names)) for split in splits}
    total = np.sum([*boxes_of.values()], axis=0)
    issues = []
    unused = [f"{names[c]} ({c})" for c in np.flatnonzero(total == 0)]
    if unused:
        verb = "has" if len(names) == 1 else "have"
        count = f"{len(unused):,} of {counted(len(names), 'class')} {verb} no box"
        issues.append(Issue(UNUSED, f"{count} in {', '.join(boxes_of)}: {listed(unused, MAX_NAMED_CLASSES)}"))
    for rare in np.flatnonzero(total > 0).tolist():
        for frequent in np.flatnonzero(total >= MIN_BOXES_RATIO * total[rare]).tolist():
            if _num_letters(names[rare], names[frequent]) <= MAX_LETTERS:
                boxes = counted(int(total[rare]), "box")
                issues.append(Issue(SIMILAR, f"'{names[rare]}' has {boxes}, '{names[frequent]}' {total[frequent]:,}"))
    for split, scored in boxes_of.items() if "train" in boxes_of else ():
        for c in np.flatnonzero((scored > 0) & (boxes_of["train"] == 0)).tolist():
            text = f"'{names[c]}': {counted(int(scored[c]), 'box')} in {split}, none in train"
            issues.append(Issue(NOT_TRAINED, text, split))
    return issues


def _num_letters(name: str, other: str) -> int:
    """Returns in how many letters two names differ, without case."""
    blocks = difflib.SequenceMatcher(None, name.lower(), other.lower(), autojunk=False).get_matching_blocks()
    return max(len(name), len(other)) - sum(block.size for block in blocks)
