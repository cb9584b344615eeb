"""Finds the images outside a split that the split's one label file may also name."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path

from data.image_io.file_kinds import image_suffixes
from data.source.dataset_spec import DatasetSpec
from data.source.listing.image_list import is_image
from data.source.listing.images import SplitImages, find_images_leniently
from data.source.listing.other_splits import entries_without_images, splits_before, splits_with_other_images
from data.source.walk import Folders, Visit, none_if_missing, walk
from data.split_files import NamesOfImage, OtherImages
from utils.files.paths import path_of, relative_name

_MAX_FOLDERS = 1000  # folders next to a split's folders that are searched for images in the same label file


def images_in_label_file(spec: DatasetSpec, split: str, split_images: SplitImages) -> OtherImages:
    """Returns the images outside a split that its one label file may name."""
    folders = Folders(spec.root)
    missing_elsewhere: list[str] = []
    earlier: dict[str, NamesOfImage] = {}  # by name
    later: dict[str, NamesOfImage] = {}
    split_names = split_images.names
    known = set(split_names)
    earlier_splits = splits_before(spec, split)
    for other in _splits_with_same_file(spec, split):
        found = find_images_leniently(spec, other, folders)
        missing_elsewhere += found.missing
        images = earlier if other in earlier_splits else later
        for name in found.images.keys() - split_names:
            names = (found.images[name], *found.aliases.get(name, ()))
            images[name] = tuple(file._replace(stamp=None) for file in names if file.name not in split_names)
        known |= found.names

    return OtherImages(
        earlier_splits=[earlier[name] for name in sorted(earlier)],
        later_splits=[later[name] for name in sorted(later.keys() - earlier.keys())],
        unassigned=images_of_no_split(spec, split, folders, known=known),
        missing=split_images.missing,
        missing_elsewhere=missing_elsewhere,
        without_images=[relative_name(entry, spec.root) for entry in entries_without_images(spec, split)],
    )


def _splits_with_same_file(spec: DatasetSpec, split: str) -> list[str]:
    """Returns the splits that have the same label file as ``split`` but other images."""
    splits = spec.listed_splits
    others = splits_with_other_images(spec, split)
    return [other for other in others if splits[other].annotations == splits[split].annotations]


def images_of_no_split(spec: DatasetSpec, split: str, folders: Folders, known: Collection[str]) -> list[str]:
    """Returns the sorted names of images that no split names, next to the folders of this split or to the images of its
    lists. ``known``: names of images to leave out; for lists, their folders are searched."""
    suffixes = image_suffixes(spec.pixels)
    entries = spec.listed_splits[split].images
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
    """Yields a folder and the folders below it, except split folders directly in it."""
    split_entries = {entry for split in spec.listed_splits.values() for entry in split.images}
    entries = list(folders.entries(str(folder)).values())
    yield Visit(str(folder), "", entries, [])
    for entry in entries:
        if none_if_missing(entry.is_dir) and Path(entry.path) not in split_entries:
            yield from walk(Path(entry.path))
