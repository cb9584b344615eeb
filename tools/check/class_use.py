"""Reports classes without boxes, and classes whose frequencies differ between splits."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from engine.report.issues import CheckedSplit, Issue
from tools.check.issue_kinds import IMBALANCE, NOT_TRAINED, SIMILAR, UNUSED
from utils.strings import counted, listed

# The frequencies of a class in two splits differ if their ratio and the significance of the difference exceed these.
MIN_RATIO = 2.0
MIN_DEVIATIONS = 4.0
MAX_NAMED_CLASSES = 100  # classes shown in a message
# A class may be a slip of another one that has so many times its boxes, if their names differ in so many letters.
MIN_BOXES_RATIO = 50
MAX_LETTERS = 2


def class_use(splits: Sequence[CheckedSplit]) -> list[Issue]:
    """Reports the classes without a box, in one issue, each rare class that is called almost like a frequent one, and
    each class whose frequency differs between the training split and another one.

    The frequency is the fraction of images with an object of the class, because objects of one image are not
    independent. Two frequencies differ if one is more than `MIN_RATIO` times the other and the two-proportion z-test
    gives `MIN_DEVIATIONS`.
    """
    names = splits[0].index.names
    counts = [_ClassCounts(split, len(names)) for split in splits]
    total = np.sum([split_counts.boxes for split_counts in counts], axis=0)
    issues = []
    unused = [f"{names[c]} ({c})" for c in np.flatnonzero(total == 0)]
    if unused:
        verb = "has" if len(names) == 1 else "have"
        count = f"{len(unused):,} of {counted(len(names), 'class')} {verb} no box"
        split_names = ", ".join(split.name for split in splits)
        issues.append(Issue(UNUSED, f"{count} in {split_names}: {listed(unused, MAX_NAMED_CLASSES)}"))
    for rare in np.flatnonzero(total > 0).tolist():
        for frequent in np.flatnonzero(total >= MIN_BOXES_RATIO * total[rare]).tolist():
            if _num_letters(names[rare], names[frequent]) <= MAX_LETTERS:
                boxes = (
                    f"'{names[rare]}' has {counted(int(total[rare]), 'box')}, '{names[frequent]}' {total[frequent]:,}"
                )
                issues.append(Issue(SIMILAR, boxes))
    train = next((split_counts for split_counts in counts if split_counts.split == "train"), None)
    for other in counts:
        if train is not None and other is not train:
            issues += _class_differences(train, other, names)
    return issues


def _num_letters(name: str, other: str) -> int:
    """Returns in how many letters two names differ, without case."""
    blocks = difflib.SequenceMatcher(None, name.lower(), other.lower(), autojunk=False).get_matching_blocks()
    return max(len(name), len(other)) - sum(block.size for block in blocks)


class _ClassCounts:
    """Class counts of a split."""

    def __init__(self, split: CheckedSplit, num_classes: int) -> None:
        self.split = split.name
        self.boxes = split.index.boxes_per_class(num_classes)  # int64 (C,)
        self.images = split.index.images_per_class(num_classes)  # int64 (C,)
        self.num_images = len(split.index)


def _class_differences(train: _ClassCounts, other: _ClassCounts, names: Sequence[str]) -> Iterator[Issue]:
    """Yields the classes that are scored without being trained, or whose frequencies in two splits differ."""
    for c in np.flatnonzero(train.boxes + other.boxes).tolist():
        message = (
            f"'{names[c]}': {train.boxes[c]:,} boxes in {train.images[c]:,} of {train.num_images:,} images of train, "
            f"{other.boxes[c]:,} in {other.images[c]:,} of {other.num_images:,} of {other.split}"
        )
        if train.boxes[c] == 0:
            yield Issue(NOT_TRAINED, message, other.split)
        elif _differ(train.images[c], train.num_images, other.images[c], other.num_images):
            yield Issue(IMBALANCE, message, other.split)


def _differ(count_a: int, total_a: int, count_b: int, total_b: int) -> bool:
    """Returns whether two frequencies differ beyond the limits of `class_use`."""
    if not total_a or not total_b:
        return False
    a = count_a / total_a
    b = count_b / total_b
    pooled = (count_a + count_b) / (total_a + total_b)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / total_a + 1 / total_b))
    return max(a, b) > MIN_RATIO * min(a, b) and abs(a - b) > MIN_DEVIATIONS * deviation
