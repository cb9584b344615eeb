"""Finds label files that are in the wrong folder: in one below or above those of their split."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from data.source.listing.candidate_files import Candidate
from data.source.listing.label_files import FoundLabels
from data.source.listing.other_splits import OtherSplits
from data.source.listing.similar_names import ImagesOnDisk, UnlabeledImages, loose_stem


class _NearbyFolder(NamedTuple):
    """A folder in which label files of the split may be by mistake."""

    label_folder: str  # absolute
    image_folder: str  # absolute; its images have their labels in ``label_folder``
    is_shared: bool  # other splits may have labels there, too


class MisplacedLabels:
    """Finds the label files of a split that are in folders below and above its own.

    Args:
        found: the label files that are used.
        split_folders: the folders that the split names (absolute), without its lists.
        others: the data set's other splits.
        unlabeled: the images without a label file.
        images_on_disk: finds images that no split names, too.
    """

    def __init__(
        self,
        found: FoundLabels,
        *,
        split_folders: Sequence[str],
        others: OtherSplits,
        unlabeled: UnlabeledImages,
        images_on_disk: ImagesOnDisk,
    ) -> None:
        self._images = found.images
        self._candidates = found.candidates
        self._folders = found.candidates.folders
        self._split_folders = split_folders
        self._others = others
        self._unlabeled = unlabeled
        self._images_on_disk = images_on_disk

    def files(self, searched: Container[str]) -> Iterator[Candidate]:
        """Yields the misplaced label files, each once, in other folders than those ``searched`` already."""
        yielded: set[Candidate] = set()  # a folder may be near several folders of the split
        for nearby in self._nearby_folders():
            if nearby.label_folder in searched:
                continue
            for file in self._candidates.unused(nearby.label_folder):
                is_new = file not in yielded and self._is_misplaced(file, nearby)
                if is_new and self._candidates.is_label_file(file):
                    yielded.add(file)
                    yield file

    def _nearby_folders(self) -> Iterator[_NearbyFolder]:
        for split_folder in self._split_folders:
            yield from self._folders_below(split_folder)
            if self._candidates.annotations is None:
                yield from self._folders_above(split_folder)

    def _folders_below(self, split_folder: str) -> Iterator[_NearbyFolder]:
        """Yields the label folder of a folder that the split names, and the folders below."""
        is_shared = self._candidates.annotations is not None
        label_folder = self._candidates.label_folders(split_folder)[0]
        if label_folder == split_folder:
            for folder in self._folders.walked_below(split_folder):
                yield _NearbyFolder(folder, folder, is_shared)
            return
        pending = [_NearbyFolder(label_folder, split_folder, is_shared)]
        while pending:
            nearby = pending.pop()
            yield nearby
            for name in self._candidates.folders_in(nearby.label_folder):
                inner_labels = os.path.join(nearby.label_folder, name)
                inner_images = os.path.join(nearby.image_folder, name)
                pending.append(_NearbyFolder(inner_labels, inner_images, is_shared))

    def _folders_above(self, split_folder: str) -> Iterator[_NearbyFolder]:
        """Yields the label folders of the folders above one that the split names, up to ``images``."""
        image_folder = split_folder
        while os.path.basename(image_folder) != "images":
            image_folder = os.path.dirname(image_folder)
            label_folder = self._candidates.label_folders(image_folder)[0]
            if label_folder == image_folder or Path(image_folder) in self._folders.root.parents:
                return
            yield _NearbyFolder(label_folder, image_folder, is_shared=True)

    def _is_misplaced(self, file: Candidate, nearby: _NearbyFolder) -> bool:
        """Returns whether a file in a nearby folder belongs to no image there, and may belong to one of this split."""
        stem = loose_stem(file.name)
        if stem in self._images_on_disk.names_in(nearby.image_folder) or stem in self._labeled_stems:
            return False
        if stem in self._unlabeled or not nearby.is_shared:
            return True
        return self._others.is_first and stem not in self._others.stems

    @cached_property
    def _labeled_stems(self) -> frozenset[str]:
        """The loose stems of the images with a label file."""
        return frozenset(loose_stem(image.base_name) for image in self._images if not image.is_unlabeled)
