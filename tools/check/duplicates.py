"""Finds damaged images and near-duplicates, within and across the splits of a data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.folds.near_duplicates import duplicate_groups, read_signatures, roboflow_copies
from engine.evaluation.issues import CheckedSplit, Issue
from tools.check.issue_kinds import ACROSS, AUGMENTED, COPIED, DAMAGED, WITHIN
from utils.strings import counted, listed


def image_issues(splits: Sequence[CheckedSplit], workers: int) -> list[Issue]:
    """Returns damaged images and near-duplicates, within and across ``splits``. An image may be in two splits."""
    owner = np.repeat(np.arange(len(splits)), [len(s.index) for s in splits])
    paths = [s.index.path(i) for s in splits for i in range(len(s.index))]
    names = [name for s in splits for name in s.index.paths]
    signatures, warnings = read_signatures(paths, workers, splits[0].index.pixels)
    issues = [Issue(DAMAGED, warning, splits[owner[i]].name, (names[i],)) for i, warning in sorted(warnings.items())]
    copies = roboflow_copies(names)
    origin = np.arange(len(names))  # the first copy of the same image
    for group in copies:
        origin[group] = group[0]
    groups = [(COPIED, group) for group in copies if len(set(owner[group])) > 1]
    groups += [(WITHIN if len(set(owner[group])) == 1 else ACROSS, group) for group in duplicate_groups(signatures)]
    duplicates = []
    for kind, group in groups:
        owners = tuple(splits[i].name for i in owner[group])
        files = tuple(names[i] for i in group)
        if len(set(files)) == 1:
            if kind == ACROSS:
                duplicates.append(Issue(ACROSS, f"listed in {' and '.join(owners)}", "", files, splits=owners))
            continue
        if kind != COPIED and len(set(origin[group])) == 1:  # reported as Roboflow's copies
            continue
        is_across = kind != WITHIN
        named = [f"{name} ({split})" if is_across else name for name, split in zip(files, owners)]
        relation = "is a copy of the same image as" if kind == COPIED else "is nearly"
        message = f"{relation} {listed(named[1:], 5)}"
        if is_across:
            duplicates.append(Issue(kind, f"({owners[0]}) {message}", "", files, splits=owners))
        else:
            duplicates.append(Issue(kind, message, owners[0], files))
    issues += sorted(duplicates, key=lambda issue: (issue.kind, issue.images))
    for number, split in enumerate(splits):
        _, counts = np.unique(origin[owner == number], return_counts=True)
        several = counts[counts > 1]
        if several.size:
            originals = counted(several.size, "image")
            message = f"{several.sum():,} of {counts.sum():,} images are Roboflow's copies of {originals}"
            issues.append(Issue(AUGMENTED, message, split.name))
    return issues
