"""Decides which split loses an image that a label file names but no split contains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from data.labels.image_names import ImageNames, loose, readings_of
from data.split_files import ImageFile, OtherImages


class Owner(Enum):
    """The split that an absent image belongs to."""

    LISTED = auto()  # this split, where a row of a list names it and already counts as the lost image
    HERE = auto()  # this split
    ELSEWHERE = auto()  # another split
    MISSING_FOLDER = auto()  # possibly another split, none of whose images exist
    UNKNOWN = auto()  # any split with this label file


class AbsentImages:
    """Decides which split a nonexistent image would belong to: the split whose list names it, or whose image folders
    match the image's folders best. If a missing folder matches at least as well, the image may be in that folder."""

    def __init__(self, images: Sequence[ImageFile], others: OtherImages) -> None:
        self._images = images
        self._others = others
        other_images = (*others.earlier_splits, *others.later_splits)
        self._images_of_other_splits = [file for names in other_images for file in names]

    def owner(self, file_name: str, *, has_name: bool) -> Owner:
        """Returns the owner of the image that a label file names ``file_name``. ``has_name``: an existing image has
        this name, so that only a folder in it shows that it is of a missing folder."""
        if self._others.missing and self._missing_here.find(file_name):
            return Owner.LISTED
        if self._others.missing_elsewhere and self._missing_elsewhere.find(file_name):
            return Owner.ELSEWHERE
        if not self._images_of_other_splits and not self._others.without_images:
            return Owner.UNKNOWN
        here = self._folders_here.agreement(file_name)
        elsewhere = self._folders_elsewhere.agreement(file_name)
        if self._others.without_images:
            missing = self._agreement_with_missing(file_name)
            closest = max(here, elsewhere)
            if missing > closest or (missing == closest and not has_name):
                return Owner.MISSING_FOLDER
        if here == elsewhere:
            return Owner.UNKNOWN
        return Owner.HERE if here > elsewhere else Owner.ELSEWHERE

    def _agreement_with_missing(self, file_name: str) -> int:
        """Returns the largest number of folders that ``file_name`` has in common with a missing folder or has below
        it."""
        folders = [reading for name in self._others.without_images for reading in readings_of(name)]
        return max(
            (_agreement_below(folder, parts[:-1]) for folder in folders for parts in readings_of(file_name)), default=0
        )

    @cached_property
    def _missing_here(self) -> ImageNames:
        return ImageNames.of_single_names(self._others.missing)

    @cached_property
    def _missing_elsewhere(self) -> ImageNames:
        return ImageNames.of_single_names(self._others.missing_elsewhere)

    @cached_property
    def _folders_here(self) -> _ImageFolders:
        return _ImageFolders(self._images)

    @cached_property
    def _folders_elsewhere(self) -> _ImageFolders:
        return _ImageFolders(self._images_of_other_splits)


class SplitSizes(NamedTuple):
    """Sizes, in images or entries, of the splits that share a label file, and thus its losses in proportion."""

    earlier: int  # total of the splits before this one
    this: int
    later: int  # total of the splits after this one and of images in no split, whose share is not lost

    def share_of(self, count: int) -> range:
        """Returns the range of the ``count`` unassigned losses that this split counts, so that each is counted once.

        All splits see the same losses in the same order, and each counts a range in proportion to its size. With three
        losses and splits of 60, 30 and 10 images, the first split counts losses 0 and 1, the second loss 2, and the
        third none.
        """
        total = self.earlier + self.this + self.later
        first = math.ceil(count * self.earlier / total)
        end = math.ceil(count * (self.earlier + self.this) / total)
        return range(first, end)


class _ImageFolders:
    """Compares the folders in file names with the folders of images."""

    def __init__(self, images: Sequence[ImageFile]) -> None:
        image_of = {image.name.rpartition("/")[0]: image.name for image in images}
        names_of: dict[str, list[str]] = {}  # one image per folder, by the last part of the folder's path
        for folder, name in image_of.items():
            names_of.setdefault(loose(folder.rpartition("/")[2]), []).append(name)
        self._images_of = {last: ImageNames.of_single_names(names) for last, names in names_of.items()}

    def agreement(self, file_name: str) -> int:
        """Returns the largest number of trailing folders that ``file_name`` has in common with an image folder."""
        last_folders = {loose(parts[-2]) for parts in readings_of(file_name) if len(parts) > 1}
        fits = [self._images_of[last] for last in last_folders if last in self._images_of]
        return max((images.agreement(file_name, i) for images in fits for i in range(len(images))), default=0)


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
