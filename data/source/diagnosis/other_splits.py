"""Finds the images of a data set besides those of one split: an unused label file of that split may be theirs."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

from data.labels.image_names import loose
from data.source.dataset_spec import DatasetSpec
from data.source.listing.images import find_valid_images
from data.source.listing.other_images import images_of_no_split, splits_before
from data.source.walk import Folders
from utils.files.paths import path_of


class OtherSplits:
    """Answers questions about the other splits of a data set, which are listed only when they are asked.

    Args:
        split: this split.
        images: names of its images.
    """

    def __init__(self, spec: DatasetSpec, split: str, images: Collection[str]) -> None:
        self._spec = spec
        self._split = split
        self._images = images
        self._folders = Folders(spec.root)
        self.is_first_split = split == next(iter(spec.splits))  # no split is named before this one

    @cached_property
    def stems(self) -> frozenset[str]:
        """`loose` names, without suffix, of other images whose labels may be where this split's are."""
        annotations = self._spec.split(self._split).annotations
        names: list[str] = []
        for other, source in self._spec.splits.items():
            if other != self._split and _share_labels(annotations, source.annotations):
                names += find_valid_images(self._spec, other, self._folders).images
        if annotations is not None:
            names += images_of_no_split(self._spec, self._split, self._folders, known=self._images)
        return frozenset(loose(os.path.splitext(name.rpartition("/")[2])[0]) for name in names)

    @cached_property
    def folders_before(self) -> frozenset[str]:
        """The folders (absolute) of the images of splits that the data set names before this one."""
        names: set[str] = set()
        for other in splits_before(self._spec, self._split):
            images = find_valid_images(self._spec, other, self._folders).images
            names |= {name.rpartition("/")[0] for name in images}
        return frozenset(path_of(name, self._spec.root) for name in names)


def _share_labels(first: Path | None, second: Path | None) -> bool:
    """Returns whether the label files of two splits may be in the same folder. None: they are next to the images."""
    if first is None or second is None:
        return first is None and second is None
    return first.is_relative_to(second) or second.is_relative_to(first)
