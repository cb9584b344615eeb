"""Divides a data set into folds: images of a group stay together, and classes are spread evenly.

Legend: N images, G groups, C classes, K folds.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.folds.near_duplicates import duplicate_groups, join_groups, read_signatures, roboflow_copies
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files.safe_io import csv_cell, read_text
from utils.machine.resources import available_cores
from utils.rng import keyed_generator, named_stream
from utils.strings import counted, listed

MAX_MOVES = 1000  # moves of groups that even out the folds


def scan_settings(config: TrainConfig) -> IndexSettings:
    """Returns how a split is read that will be divided, by the settings of a training."""
    return IndexSettings(
        cache_dir=config.cache_dir,
        workers=available_cores() if config.workers < 0 else config.workers,
        max_bad=config.max_bad,
        single_cls=config.single_cls,
        repeats=False,
    )


def groups_of(index: DatasetIndex, groups: str, near_duplicates: bool) -> np.ndarray:
    """Returns the group of each image, int64 (N,), from 0. Images with the same group name (``groups``: ``--groups``),
    near-duplicates, and Roboflow's copies of one image share a group. Raises UserError for unusable ``groups``."""
    paths = list(index.paths)
    parent = np.arange(len(paths))
    if groups:
        _, first, name = np.unique(_group_names(paths, groups), return_index=True, return_inverse=True)
        parent = join_groups(parent, parent, first[name])
    if near_duplicates:
        signatures, _ = read_signatures([index.path(i) for i in range(len(paths))], available_cores(), index.pixels)
        copies = [*duplicate_groups(signatures), *roboflow_copies(paths)]
        pairs = [(group[:-1], group[1:]) for group in copies]
        if pairs:
            parent = join_groups(parent, *map(np.concatenate, zip(*pairs)))
    return np.unique(parent, return_inverse=True)[1].astype(np.int64)


def _group_names(paths: Sequence[str], groups: str) -> list[str]:
    """Returns the group name of each image, by a CSV file or a regular expression. Raises UserError."""
    if groups.lower().endswith(".csv"):
        return _names_in_file(paths, Path(groups))
    try:
        pattern = re.compile(groups)
    except re.error as error:
        raise UserError(f"--groups {groups}: not a regular expression ({error})") from None
    names: list[str] = []
    unmatched: list[str] = []
    for path in paths:
        match = pattern.search(path)
        if match is None:
            unmatched.append(path)
        else:
            names.append("\0".join(match.groups("")) if pattern.groups else match[0])
    if unmatched:
        raise UserError(
            f"--groups {groups}: does not match {len(unmatched)} of {len(paths)} images, such as {unmatched[0]}"
        )
    return names


def _names_in_file(paths: Sequence[str], file: Path) -> list[str]:
    """Returns the group name of each image by the columns ``image`` and ``group`` of a CSV file. Raises UserError."""
    rows = csv.DictReader(io.StringIO(read_text(file)))
    if not {"image", "group"} <= set(rows.fieldnames or ()):
        raise UserError(f"--groups {file}: the first line must name the columns image and group")
    group_of = {os.path.normpath(row["image"] or ""): row["group"] or "" for row in rows}
    names: list[str] = []
    absent: list[str] = []
    for path in paths:
        keys = [key for key in (path, os.path.basename(path), csv_cell(path)) if key in group_of]
        if keys:
            names.append(group_of[keys[0]])
        else:
            absent.append(path)
    if absent:
        raise UserError(
            f"--groups {file}: names no group of {len(absent)} of {len(paths)} images, such as {absent[0]} (images "
            "are named by their path relative to the data set's folder, or by their file name)"
        )
    return names


def class_counts(index: DatasetIndex) -> np.ndarray:
    """Counts the boxes of each class in each image, int64 (N, C), without crowd regions."""
    cell = (index.image_of_box * len(index.names) + index.classes)[~index.crowd]
    return np.bincount(cell, minlength=len(index) * len(index.names)).reshape(len(index), -1)


def assign_folds(group: np.ndarray, counts: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Returns the fold of each image, int64 (N,) from 0, by iterative stratification (Sechidis et al. 2011) of groups.

    The rarest remaining class is distributed first: its groups, those with most boxes first, go to the fold that lacks
    most boxes of this class, then to the one that lacks most images. Groups without boxes fill up the folds with fewest
    images. Moves of single groups then even out the frequent classes.

    ``group``: int64 (N,), from 0; ``counts``: `class_counts`. Raises UserError if there are fewer groups than folds.
    """
    groups = int(group.max(initial=-1)) + 1
    if groups < folds:
        raise UserError(f"--folds {folds}: the images form only {counted(groups, 'group')}, each of one fold")
    boxes = np.zeros((groups, counts.shape[1]), np.int64)
    np.add.at(boxes, group, counts)
    images = np.bincount(group, minlength=groups)
    shuffled = keyed_generator(seed, named_stream("folds")).permutation(groups)
    boxes_missing = np.tile(boxes.sum(0) / folds, (folds, 1))
    images_missing = np.full(folds, images.sum() / folds)
    fold_of = np.full(groups, -1)

    def put(members: np.ndarray, lacking: np.ndarray | None) -> None:
        for g in members.tolist():
            first = images_missing if lacking is None else lacking
            most = np.flatnonzero(first == first.max())
            fold = most[np.argmax(images_missing[most])]
            fold_of[g] = fold
            boxes_missing[fold] -= boxes[g]
            images_missing[fold] -= images[g]

    while (left := fold_of[shuffled] < 0).any():
        open_groups = shuffled[left]
        totals = boxes[open_groups].sum(0)
        if not totals.any():
            put(open_groups[np.argsort(-images[open_groups], kind="stable")], None)
            break
        rarest = int(np.flatnonzero(totals == totals[totals > 0].min())[0])
        members = open_groups[boxes[open_groups, rarest] > 0]
        put(members[np.argsort(-boxes[members, rarest], kind="stable")], boxes_missing[:, rarest])
    _even_out(fold_of, np.column_stack([boxes, images]).astype(np.float64), folds)
    while (number := np.bincount(fold_of, minlength=folds)).min() == 0:  # the smallest group of the fold with most
        members = np.flatnonzero(fold_of == number.argmax())
        fold_of[members[images[members].argmin()]] = number.argmin()
    return fold_of[group]


def _even_out(fold_of: np.ndarray, counts: np.ndarray, folds: int) -> None:
    """Moves single groups while that makes the folds more even, since distributing the rarest class first leaves the
    others less so. Minimizes the sum over folds and columns of the squared difference relative to the even share.
    ``fold_of``: int64 (G,), changed in place; ``counts``: float64 (G, columns)."""
    counts = counts[:, counts.sum(0) > 0]
    relative = counts * folds / counts.sum(0)
    squared_norm = (relative**2).sum(1)
    totals = np.zeros((folds, relative.shape[1]))
    np.add.at(totals, fold_of, relative)
    rows = np.arange(len(counts))
    for _ in range(MAX_MOVES):
        towards = relative @ totals.T  # (G, K)
        change = towards - towards[rows, fold_of][:, None] + squared_norm[:, None]  # half of the change
        change[rows, fold_of] = 0.0
        group, fold = np.unravel_index(change.argmin(), change.shape)
        if change[group, fold] >= -1e-9:
            return
        totals[fold_of[group]] -= relative[group]
        totals[fold] += relative[group]
        fold_of[group] = fold


def rare_classes(index: DatasetIndex, folds: int) -> str:
    """Returns a note about classes that cannot be in every fold; "" if there are none."""
    total = class_counts(index).sum(0)
    rare = [f"{name} ({count})" for name, count in zip(index.names, total.tolist()) if count < folds]
    if not rare:
        return ""
    count = counted(len(rare), "class")
    return f"{count} with fewer boxes than there are folds, so missing in some: {listed(rare, 10)}"
