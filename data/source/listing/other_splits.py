"""Finds the images of a data set besides those of one split: label files of that split, or its only one, may have their
labels, too."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path

from data.image_io.file_kinds import image_suffixes
from data.labels.image_names import loose
from data.labels.label_format import ImageFile, OtherImages
from data.source.dataset_spec import DatasetSpec
from data.source.listing.image_list import is_image
from data.source.listing.images import find_valid_images
from data.source.walk import Folders, Visit, query, walk
from utils.files.paths import path_of

_MAX_FOLDERS = 1000  # folders next to those of a split that are searched for images with the same labels


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
        self._folders = Folders(spec.root)  # not those of this split: they tell which folders its own walk has seen
        self.is_first = split == next(iter(spec.splits))  # no split is named before this one

    @cached_property
    def stems(self) -> frozenset[str]:
        """`loose` names, without suffix, of other images whose labels may be where this split's are."""
        annotations = self._spec.split(self._split).annotations
        names: list[str] = []
        for other, source in self._spec.splits.items():
            if other != self._split and _share_labels(annotations, source.annotations):
                names += find_valid_images(self._spec, other, self._folders).images
        if annotations is not None:
            names += self._images_of_no_split(known=self._images)
        return frozenset(loose(os.path.splitext(name.rpartition("/")[2])[0]) for name in names)

    @cached_property
    def folders_before(self) -> frozenset[str]:
        """The folders (absolute) of the images of splits that the data set names before this one."""
        names: set[str] = set()
        for other in itertools.takewhile(lambda name: name != self._split, self._spec.splits):
            images = find_valid_images(self._spec, other, self._folders).images
            names |= {name.rpartition("/")[0] for name in images}
        return frozenset(path_of(name, self._spec.root) for name in names)

    def images_in_label_file(self, missing: list[str]) -> OtherImages:
        """Returns the other images that this split's label file for all images may name. ``missing``: names in lists
        of this split that do not exist."""
        spec = self._spec
        this_source = spec.split(self._split)
        before: dict[str, ImageFile] = {}
        after: dict[str, ImageFile] = {}
        missing_elsewhere: list[str] = []
        order = list(spec.splits)
        for other, source in spec.splits.items():
            is_same = _real_paths(source.images) == _real_paths(this_source.images)  # it has no other images
            if source.annotations != this_source.annotations or is_same:
                continue
            images = before if order.index(other) < order.index(self._split) else after
            found = find_valid_images(spec, other, self._folders)
            images |= {image.name: image._replace(stamp=None) for image in found.images.values()}
            missing_elsewhere += found.missing
        of_splits_before = [before[name] for name in sorted(before) if name not in self._images]
        of_splits_after = [after[name] for name in sorted(after) if name not in self._images and name not in before]
        names_of_no_split = self._images_of_no_split(known={*self._images, *before, *after})
        of_no_split = [ImageFile(name, "", None) for name in names_of_no_split]
        return OtherImages(
            images=[*of_splits_before, *of_splits_after, *of_no_split],
            missing=missing,
            missing_elsewhere=missing_elsewhere,
            num_before=len(of_splits_before),
        )

    def _images_of_no_split(self, known: Collection[str]) -> list[str]:
        """Returns the names, sorted, of images that no split names, next to the folders of this split or to the images
        of its lists. ``known``: names of images to leave out, and of those whose folders are searched for a list."""
        spec = self._spec
        suffixes = image_suffixes(spec.pixels)
        entries = spec.split(self._split).images
        searched = {entry.parent for entry in entries if entry.is_dir()}
        if not all(entry.is_dir() for entry in entries):
            image_folders = {name.rpartition("/")[0] for name in known}
            searched |= {Path(path_of(folder, spec.root)) for folder in image_folders}
        names: set[str] = set()
        for folder in sorted(searched):
            if not folder.is_relative_to(spec.root):
                continue
            for visit in itertools.islice(self._walk_besides_splits(folder), _MAX_FOLDERS):
                prefix = self._folders.name_in(visit.path)
                names |= {prefix + entry.name for entry in visit.entries if is_image(entry.name, suffixes)}
        return sorted(names.difference(known))

    def _walk_besides_splits(self, folder: Path) -> Iterable[Visit]:
        """Yields a folder and those below it, without the folders of splits in it."""
        split_entries = {entry for source in self._spec.splits.values() for entry in source.images}
        entries = list(self._folders.entries(str(folder)).values())
        yield Visit(str(folder), "", entries, [])
        for entry in entries:
            if query(entry.is_dir) and Path(entry.path) not in split_entries:
                yield from walk(Path(entry.path))


def _share_labels(first: Path | None, second: Path | None) -> bool:
    """Returns whether the label files of two splits may be in the same folder. None: they are next to the images."""
    if first is None or second is None:
        return first is None and second is None
    return first.is_relative_to(second) or second.is_relative_to(first)


def _real_paths(entries: Iterable[Path]) -> list[str]:
    return sorted(map(os.path.realpath, entries))
