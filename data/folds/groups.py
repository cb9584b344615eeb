"""Groups images that must stay together: near-duplicates, copies of one image, and images with one ``--groups`` name.

Legend: N images.
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
from data.index import DatasetIndex
from utils.errors import UserError
from utils.files.safe_io import csv_cell, read_text
from utils.machine.resources import available_cores


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
    """Returns the group name of each image, from a CSV file or a regular expression. Raises UserError."""
    if groups.lower().endswith(".csv"):
        return _names_in_file(paths, Path(groups))
    try:
        pattern = re.compile(groups)
    except (re.error, OverflowError, RecursionError) as error:  # the last two for too many repetitions or parentheses
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
    """Returns the group name of each image, from a CSV file. Raises UserError."""
    try:
        group_of = _read_groups(file)
    except csv.Error as error:
        raise UserError(f"--groups {file}: not a CSV file ({error})") from None
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
            f"--groups {file}: has no group for {len(absent)} of {len(paths)} images, such as {absent[0]} (images "
            "are named by their path relative to the data set's folder, or by their file name)"
        )
    return names


def _read_groups(file: Path) -> dict[str, str]:
    """Reads the group name of each name in the columns ``image`` and ``group`` of a CSV file.

    Raises csv.Error if the file is not CSV, and UserError if it is unreadable, lacks a column, or puts an image into
    two groups.
    """
    rows = csv.DictReader(io.StringIO(read_text(file)))
    if not {"image", "group"} <= set(rows.fieldnames or ()):
        raise UserError(f"--groups {file}: the first line must name the columns image and group")
    group_of: dict[str, str] = {}
    for row in rows:
        image = os.path.normpath(row["image"] or "")
        group = row["group"] or ""
        if group_of.setdefault(image, group) != group:
            raise UserError(f"--groups {file}:{rows.line_num}: {image} is in two groups, {group_of[image]} and {group}")
    return group_of
