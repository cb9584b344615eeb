"""Decides which of the splits that share a label file lose an image that the file names but that does not exist.

All of these splits come to the same decision, so that each loss is counted once, whichever of them a run reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data.labels.image_names import ImageNames, loose, readings_of


class SplitSizes(NamedTuple):
    """Sizes, in images or entries, of the splits that share a label file, and thus its losses in proportion."""

    earlier: int = 0  # total of the splits before this one
    this: int = 0
    later: int = 0  # total of the splits after this one and of images in no split, whose share is not lost

    def plus(self, other: SplitSizes) -> SplitSizes:
        return SplitSizes(self.earlier + other.earlier, self.this + other.this, self.later + other.later)

    def share_of(self, count: int) -> range:
        """Returns the range of ``count`` losses that this split counts, so that each is counted once.

        All splits see the same losses in the same order, and each counts a range in proportion to its size. With three
        losses and splits of 60, 30 and 10 images, the first split counts losses 0 and 1, the second loss 2, and the
        third none.
        """
        total = self.earlier + self.this + self.later
        first = math.ceil(count * self.earlier / total)
        end = math.ceil(count * (self.earlier + self.this) / total)
        return range(first, end)


class ImageFolders:
    """The image folders of the splits that share a label file.

    Args:
        earlier: names of the images in the splits before this one.
        this: names of this split's images.
        later: names of the images in the splits after this one.
    """

    def __init__(self, earlier: Iterable[str], this: Iterable[str], later: Iterable[str]) -> None:
        self._sizes: dict[str, SplitSizes] = {}  # number of images, by folder
        for names, one in ((earlier, SplitSizes(1)), (this, SplitSizes(0, 1)), (later, SplitSizes(0, 0, 1))):
            for name in names:
                folder = folder_of(name)
                self._sizes[folder] = self._sizes.get(folder, SplitSizes()).plus(one)
        folders_of: dict[str, list[str]] = {}  # by the last part of the folder's path
        for folder in self._sizes:
            folders_of.setdefault(loose(folder.rpartition("/")[2]), []).append(folder)
        self._folders_of = folders_of

    def closest(self, file_name: str) -> frozenset[str]:
        """Returns the folders that have the most trailing parts in common with the folders in ``file_name``, or all
        folders if none has any."""
        agreements = self._agreements(file_name)
        best = max(agreements.values(), default=0)
        return frozenset(folder for folder in agreements or self._sizes if agreements.get(folder, 0) == best)

    def may_lack(self, file_name: str, missing: Iterable[str], *, has_name: bool) -> bool:
        """Returns whether an image may be in one of the ``missing`` folders: its folders agree with one of these as
        well as with any existing folder. If an existing image has its name (``has_name``), they must agree better."""
        folders = [reading for name in missing for reading in readings_of(name)]
        agreement = max(
            (_agreement_below(folder, parts[:-1]) for folder in folders for parts in readings_of(file_name)), default=0
        )
        closest = max(self._agreements(file_name).values(), default=0)
        return agreement > closest or (agreement == closest and not has_name)

    def _agreements(self, file_name: str) -> dict[str, int]:
        """Returns, by folder, how many trailing parts it has in common with the folders in ``file_name``, at least
        one."""
        last_parts = {loose(parts[-2]) for parts in readings_of(file_name) if len(parts) > 1}
        folders = [folder for last in last_parts for folder in self._folders_of.get(last, ())]
        images = ImageNames.of_single_names(f"{folder}/image" for folder in folders)
        return {folder: images.agreement(file_name, i) for i, folder in enumerate(folders)}

    def sizes(self, folders: Iterable[str]) -> SplitSizes:
        """Returns the number of images that the splits have in ``folders``."""
        total = SplitSizes()
        for folder in folders:
            total = total.plus(self._sizes[folder])
        return total


def folder_of(name: str) -> str:
    """Returns the folder of an image, from its name."""
    return name.rpartition("/")[0]


def _agreement_below(folder: Sequence[str], parents: Sequence[str]) -> int:
    """Returns how many of the folders ``parents`` of a file name are the last ones of ``folder``, plus those below it;
    0 if they do not contain its last one."""
    agreement = 0
    for depth in range(1, len(parents) + 1):
        pairs = zip(reversed(folder), reversed(parents[:depth]))
        common = sum(1 for _ in itertools.takewhile(lambda pair: loose(pair[0]) == loose(pair[1]), pairs))
        if common:
            agreement = max(agreement, common + len(parents) - depth)
    return agreement
