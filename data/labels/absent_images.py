"""Decides whose loss it is if a label file names an image that no split has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from data.labels.image_names import ImageNames, loose, readings_of
from data.split_files import ImageFile, OtherImages


class Owner(Enum):
    """Says to which split an absent image belongs."""

    LISTED = auto()  # to this one: a row of its lists names it, and counts as the lost image
    HERE = auto()  # to this one
    ELSEWHERE = auto()  # to another one
    UNKNOWN = auto()  # any split with this label file may be the owner


class AbsentImages:
    """Decides which split an image that does not exist would belong to: the one whose list names it, or the one whose
    folders fit its own best."""

    def __init__(self, images: Sequence[ImageFile], others: OtherImages) -> None:
        self._images = images
        self._others = others
        other_images = (*others.earlier_splits, *others.later_splits)
        self._images_of_other_splits = [file for names in other_images for file in names]

    def owner(self, file_name: str) -> Owner:
        """Returns the owner of the image that a label file names so."""
        if self._others.missing and self._missing_here.find(file_name):
            return Owner.LISTED
        if self._others.missing_elsewhere and self._missing_elsewhere.find(file_name):
            return Owner.ELSEWHERE
        if not self._images_of_other_splits:
            return Owner.UNKNOWN
        here = self._folders_here.agreement(file_name)
        elsewhere = self._folders_elsewhere.agreement(file_name)
        if here == elsewhere:
            return Owner.UNKNOWN
        return Owner.HERE if here > elsewhere else Owner.ELSEWHERE

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
    """Holds the sizes of the splits with one label file, in images or entries, by which they share its losses."""

    earlier: int  # of all splits before this one
    this: int
    later: int  # of all splits after this one, and of what is in no split, whose share is not lost

    def share_of(self, count: int) -> range:
        """Returns which of ``count`` losses that may be of any split count in this one, so that each counts once.

        All splits see the same losses in the same order, and each counts a part of them in proportion to its size. Of
        three losses and splits of 60, 30 and 10 images, the first counts numbers 0 and 1, the second 2, and the third
        none.
        """
        total = self.earlier + self.this + self.later
        first = math.ceil(count * self.earlier / total)
        end = math.ceil(count * (self.earlier + self.this) / total)
        return range(first, end)


class _ImageFolders:
    """Compares the folders of file names with those of images."""

    def __init__(self, images: Sequence[ImageFile]) -> None:
        image_of = {image.name.rpartition("/")[0]: image.name for image in images}
        names_of: dict[str, list[str]] = {}  # an image of each folder, by the folder's own name
        for folder, name in image_of.items():
            names_of.setdefault(loose(folder.rpartition("/")[2]), []).append(name)
        self._images_of = {last: ImageNames.of_single_names(names) for last, names in names_of.items()}

    def agreement(self, file_name: str) -> int:
        """Returns how many of its last folders ``file_name`` has in common with a folder of images, at most."""
        last_folders = {loose(parts[-2]) for parts in readings_of(file_name) if len(parts) > 1}
        fits = [self._images_of[last] for last in last_folders if last in self._images_of]
        return max((images.agreement(file_name, i) for images in fits for i in range(len(images))), default=0)
