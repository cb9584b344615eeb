"""Finds damaged images and near-duplicates, within and across the splits of a data set.

Legend: N images of all splits, numbered one after another. An image may be in two splits, and then has two numbers.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.folds.near_duplicates import duplicate_groups, read_signatures, roboflow_copies
from data.images.decode import read_bytes
from data.images.shards import shard_index
from data.index.shared_images import real_paths
from engine.issues.issue import CheckedSplit, Issue
from tools.check.issue_kinds import (
    AUGMENTED_COPIES,
    COPIES_ACROSS_SPLITS,
    DAMAGED,
    DUPLICATES_ACROSS_SPLITS,
    DUPLICATES_WITHIN_SPLIT,
)
from utils.errors import UserError
from utils.strings import counted, listed

MAX_NAMED_IMAGES = 5  # file names shown in a message


def image_issues(splits: Sequence[CheckedSplit], workers: int) -> list[Issue]:
    """Returns issues about unreadable images and near-duplicates, within and across ``splits``."""
    images = _PooledImages(splits)
    signatures, problems = read_signatures(images.paths, workers, splits[0].index.pixels)
    copies = roboflow_copies(images.names)
    original = np.arange(len(images.names))  # int64 (N,): the first of Roboflow's copies of an image
    for group in copies:
        original[group] = group[0]
    duplicates = [
        *_files_in_several_splits(images),
        *_copies(images, copies),
        *_near_duplicates(images, duplicate_groups(signatures), original),
    ]
    duplicates.sort(key=lambda issue: (issue.kind, issue.images))
    damaged = [
        Issue(DAMAGED, problem, images.split_of(i), (images.names[i],)) for i, problem in sorted(problems.items())
    ]
    return [*damaged, *duplicates, *_augmented(images, original)]


class _PooledImages:
    """The images of all splits."""

    def __init__(self, splits: Sequence[CheckedSplit]) -> None:
        self.splits = splits
        self.split_numbers = np.repeat(np.arange(len(splits)), [len(split.index) for split in splits])  # int64 (N,)
        self.names = [name for split in splits for name in split.index.paths]
        self.paths = [split.index.path(i) for split in splits for i in range(len(split.index))]  # absolute
        self.files = self._identify_files()  # equal for images that are one file

    def _identify_files(self) -> list[str]:
        """Returns a string for each image that identifies its file: the path without links to folders or, in shards,
        the name and a checksum if several images have this name (the shards of each split contain copies of its
        files)."""
        files = [path for split in self.splits for path in real_paths(split.index)]
        num_images_of_name = Counter(self.names)
        for i, (name, path) in enumerate(zip(self.names, self.paths)):
            if num_images_of_name[name] > 1 and shard_index(path) is not None:
                with contextlib.suppress(UserError):  # a damaged image is reported as such
                    files[i] = f"{name} {zlib.crc32(read_bytes(path))}"
        return files

    def split_of(self, image: int) -> str:
        """Returns the name of the split of an image."""
        return self.splits[self.split_numbers[image]].name

    def are_across_splits(self, group: np.ndarray) -> bool:
        """Returns whether the images ``group``, int64 (n,), are in several splits."""
        return len(np.unique(self.split_numbers[group])) > 1

    def are_one_file(self, group: np.ndarray) -> bool:
        """Returns whether the images ``group``, int64 (n,), are one file, which is listed several times."""
        return len({self.files[i] for i in group}) == 1

    def issue(self, kind: str, group: np.ndarray, relation: str) -> Issue:
        """Creates an issue about the images ``group``, int64 (n,). ``relation``: how the first image is related to the
        others, in words."""
        files = tuple(self.names[i] for i in group)
        splits = tuple(self.split_of(i) for i in group)
        if not self.are_across_splits(group):
            return Issue(kind, f"{relation} {listed(files[1:], MAX_NAMED_IMAGES)}", splits[0], files)
        others = [f"{name} ({split})" for name, split in zip(files[1:], splits[1:])]
        message = f"({splits[0]}) {relation} {listed(others, MAX_NAMED_IMAGES)}"
        return Issue(kind, message, "", files, splits=splits)


def _files_in_several_splits(images: _PooledImages) -> Iterator[Issue]:
    """Yields the files that several splits list, including files without contrast, which are not compared."""
    numbers_by_file: dict[str, list[int]] = {}
    for number, file in enumerate(images.files):
        numbers_by_file.setdefault(file, []).append(number)
    for numbers in numbers_by_file.values():
        name_in_split: dict[str, str] = {}  # symbolic links may show a file under several names
        for number in numbers:
            name_in_split.setdefault(images.split_of(number), images.names[number])
        if len(name_in_split) > 1:
            splits = tuple(name_in_split)
            message = f"listed in {' and '.join(splits)}"
            yield Issue(DUPLICATES_ACROSS_SPLITS, message, "", tuple(name_in_split.values()), splits=splits)


def _copies(images: _PooledImages, copies: Iterable[np.ndarray]) -> Iterator[Issue]:
    """Yields the images whose Roboflow copies are in several splits."""
    for group in copies:
        if images.are_across_splits(group) and not images.are_one_file(group):
            yield images.issue(COPIES_ACROSS_SPLITS, group, "is a copy of the same image as")


def _near_duplicates(images: _PooledImages, groups: Iterable[np.ndarray], original: np.ndarray) -> Iterator[Issue]:
    """Yields the groups of images that look alike, except those that are one file, or only copies of one image.
    ``original``: int64 (N,)."""
    for group in groups:
        if not images.are_one_file(group) and len(np.unique(original[group])) > 1:
            kind = DUPLICATES_ACROSS_SPLITS if images.are_across_splits(group) else DUPLICATES_WITHIN_SPLIT
            yield images.issue(kind, group, "is nearly")


def _augmented(images: _PooledImages, original: np.ndarray) -> Iterator[Issue]:
    """Yields the splits that contain several Roboflow copies of an image. ``original``: int64 (N,)."""
    for number, split in enumerate(images.splits):
        _, counts = np.unique(original[images.split_numbers == number], return_counts=True)
        num_copies = counts[counts > 1]
        if num_copies.size:
            originals = counted(num_copies.size, "image")
            message = f"{num_copies.sum():,} of {counts.sum():,} images are Roboflow's copies of {originals}"
            yield Issue(AUGMENTED_COPIES, message, split.name)
