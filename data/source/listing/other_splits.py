"""Finds the images of a data set besides those of one split: label files of that split, or its only one, may have their
labels, too."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path

from data.image_io.file_kinds import image_suffixes
from data.labels.image_names import loose
from data.labels.label_format import ImageFile, OtherImages
from data.source.dataset_spec import DatasetSpec
from data.source.listing.image_list import is_image
from data.source.listing.images import SplitImages, find_valid_images
from data.source.walk import Folders, Visit, none_if_missing, walk
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
            names += _images_of_no_split(self._spec, self._split, self._folders, known=self._images)
        return frozenset(loose(os.path.splitext(name.rpartition("/")[2])[0]) for name in names)

    @cached_property
    def folders_before(self) -> frozenset[str]:
        """The folders (absolute) of the images of splits that the data set names before this one."""
        names: set[str] = set()
        for other in _splits_before(self._spec, self._split):
            images = find_valid_images(self._spec, other, self._folders).images
            names |= {name.rpartition("/")[0] for name in images}
        return frozenset(path_of(name, self._spec.root) for name in names)


def images_in_label_file(spec: DatasetSpec, split: str, split_images: SplitImages) -> OtherImages:
    """Returns the other images that the label file of a split, one for all images, may name."""
    folders = Folders(spec.root)
    missing_elsewhere: list[str] = []
    images_before: dict[str, ImageFile] = {}
    images_after: dict[str, ImageFile] = {}
    splits_before = _splits_before(spec, split)
    for other in _splits_with_same_file(spec, split):
        found = find_valid_images(spec, other, folders)
        missing_elsewhere += found.missing
        images = images_before if other in splits_before else images_after
        images |= {image.name: image._replace(stamp=None) for image in found.images.values()}

    own = split_images.images
    known = {*own, *images_before, *images_after}
    return OtherImages(
        before=[images_before[name] for name in sorted(images_before.keys() - own.keys())],
        after=[images_after[name] for name in sorted(images_after.keys() - own.keys() - images_before.keys())],
        of_no_split=_images_of_no_split(spec, split, folders, known=known),
        missing=split_images.missing,
        missing_elsewhere=missing_elsewhere,
    )


def _splits_before(spec: DatasetSpec, split: str) -> list[str]:
    return list(itertools.takewhile(lambda name: name != split, spec.splits))


def _splits_with_same_file(spec: DatasetSpec, split: str) -> list[str]:
    """Returns the splits that have the label file of ``split``, and other images."""
    own = spec.split(split)
    own_paths = _real_paths(own.images)
    return [
        name
        for name, source in spec.splits.items()
        if source.annotations == own.annotations and _real_paths(source.images) != own_paths
    ]


def _images_of_no_split(spec: DatasetSpec, split: str, folders: Folders, known: Collection[str]) -> list[str]:
    """Returns the names, sorted, of images that no split names, next to the folders of this split or to the images of
    its lists. ``known``: names of images to leave out, and of those whose folders are searched for a list."""
    suffixes = image_suffixes(spec.pixels)
    entries = spec.split(split).images
    searched = {entry.parent for entry in entries if entry.is_dir()}
    if not all(entry.is_dir() for entry in entries):
        image_folders = {name.rpartition("/")[0] for name in known}
        searched |= {Path(path_of(folder, spec.root)) for folder in image_folders}
    names: set[str] = set()
    for folder in sorted(searched):
        if not folder.is_relative_to(spec.root):
            continue
        for visit in itertools.islice(_walk_besides_splits(folder, spec, folders), _MAX_FOLDERS):
            prefix = folders.name_in(visit.path)
            names |= {prefix + entry.name for entry in visit.entries if is_image(entry.name, suffixes)}
    return sorted(names.difference(known))


def _walk_besides_splits(folder: Path, spec: DatasetSpec, folders: Folders) -> Iterator[Visit]:
    """Yields a folder and those below it, without the folders of splits in it."""
    split_entries = {entry for source in spec.splits.values() for entry in source.images}
    entries = list(folders.entries(str(folder)).values())
    yield Visit(str(folder), "", entries, [])
    for entry in entries:
        if none_if_missing(entry.is_dir) and Path(entry.path) not in split_entries:
            yield from walk(Path(entry.path))


def _share_labels(first: Path | None, second: Path | None) -> bool:
    """Returns whether the label files of two splits may be in the same folder. None: they are next to the images."""
    if first is None or second is None:
        return first is None and second is None
    return first.is_relative_to(second) or second.is_relative_to(first)


def _real_paths(entries: Iterable[Path]) -> list[str]:
    return sorted(map(os.path.realpath, entries))
