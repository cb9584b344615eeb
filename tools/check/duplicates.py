"""Finds damaged images and near-duplicates, within and across the splits of a data set.

Legend: N images of all splits, numbered one after another. An image may be in two splits, and then has two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.folds.near_duplicates import duplicate_groups, read_signatures, roboflow_copies
from data.load import real_paths
from engine.report.label_errors import CheckedSplit, Issue, IssueKind
from utils.strings import listed

MAX_NAMED_IMAGES = 5  # file names shown in a message
DAMAGED = IssueKind(
    "damaged image", "decoders differ in how they repair such files", "get a better copy, or delete image and label"
)
DUPLICATES_ACROSS_SPLITS = IssueKind(
    "near-duplicates across splits",
    "the same image is trained on and scored on: scores are too high",
    "keep all copies in one split",
)
DUPLICATES_WITHIN_SPLIT = IssueKind(
    "near-duplicates within a split",
    "training samples duplicated images more often",
    "keep one copy, unless several are intended",
)


def image_issues(splits: Sequence[CheckedSplit], workers: int) -> list[Issue]:
    """Returns issues about images that cannot be decoded cleanly, files that several splits list, Roboflow's copies of
    an image in several splits, and images that look alike, except if they are only copies of one image."""
    names = [name for split in splits for name in split.index.paths]
    split_of = [split.name for split in splits for _ in range(len(split.index))]
    file_of = [path for split in splits for path in real_paths(split.index)]
    paths = [split.index.path(i) for split in splits for i in range(len(split.index))]
    signatures, problems = read_signatures(paths, workers, splits[0].index.pixels)
    copies = roboflow_copies(names)
    original = np.arange(len(names))  # int64 (N,): the first of Roboflow's copies of an image
    for group in copies:
        original[group] = group[0]

    def issue(kind: IssueKind, group: Sequence[int], relation: str) -> Issue:
        """Creates an issue about the images ``group``. ``relation``: of the first image to the others, in words."""
        in_splits = tuple(split_of[i] for i in group)
        files = tuple(names[i] for i in group)
        if len(set(in_splits)) == 1:
            return Issue(kind, f"{relation} {listed(files[1:], MAX_NAMED_IMAGES)}", in_splits[0], files)
        others = [f"{name} ({split})" for name, split in zip(files[1:], in_splits[1:])]
        text = f"({in_splits[0]}) {relation} {listed(others, MAX_NAMED_IMAGES)}"
        return Issue(kind, text, "", files, splits=in_splits)

    duplicates: list[Issue] = []
    numbers_of_file: dict[str, dict[str, int]] = {}  # a number by split
    for number, file in enumerate(file_of):
        numbers_of_file.setdefault(file, {}).setdefault(split_of[number], number)
    for numbers in numbers_of_file.values():
        if len(numbers) > 1:
            files = tuple(names[number] for number in numbers.values())
            text = f"listed in {' and '.join(numbers)}"
            duplicates.append(Issue(DUPLICATES_ACROSS_SPLITS, text, "", files, splits=tuple(numbers)))
    groups = [(group.tolist(), True) for group in copies]
    groups += [(group.tolist(), False) for group in duplicate_groups(signatures)]
    for group, is_copies in groups:
        is_across = len({split_of[i] for i in group}) > 1
        if len({file_of[i] for i in group}) == 1:  # one file, listed several times
            continue
        if is_copies and is_across:
            duplicates.append(issue(DUPLICATES_ACROSS_SPLITS, group, "is a copy of the same image as"))
        elif not is_copies and len(np.unique(original[group])) > 1:
            kind = DUPLICATES_ACROSS_SPLITS if is_across else DUPLICATES_WITHIN_SPLIT
            duplicates.append(issue(kind, group, "is nearly"))
    duplicates.sort(key=lambda issue: (issue.kind, issue.images))
    return [*(Issue(DAMAGED, text, split_of[i], (names[i],)) for i, text in sorted(problems.items())), *duplicates]
