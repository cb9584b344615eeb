"""Finds the images outside a split that the split's one label file may also name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from data.images.kinds import image_suffixes, is_image
from data.source.dataset_spec import DatasetSpec, folders_of
from data.source.listing.images import SplitImages, find_images_leniently
from data.source.listing.other_splits import entries_without_images, splits_before, splits_with_other_images
from data.source.walk import Folders, none_if_missing, walk
from data.split_files import FilesOfImage, OtherImages, SplitPlaces
from utils.errors import UserError
from utils.files.paths import path_of, relative_name


def images_in_label_file(spec: DatasetSpec, split: str, split_images: SplitImages) -> OtherImages:
    """Returns the places outside a split where its one label file may name images. They are the same places for each of
    the splits that share the file."""
    folders = Folders(spec.root)
    earlier_splits = splits_before(spec, split)
    others = {other: find_images_leniently(spec, other, folders) for other in _splits_with_same_file(spec, split)}
    earlier = {other: found for other, found in others.items() if other in earlier_splits}
    later = {other: found for other, found in others.items() if other not in earlier_splits}
    known = split_images.names.union(*(found.names for found in others.values()))
    unassigned: set[str] = set()
    split_folders: list[str] = []
    searched: set[str] = set()
    for sharing, found in {split: split_images, **others}.items():
        unassigned.update(images_of_no_split(spec, sharing, folders, known=known))
        split_folders += _folders(spec, sharing, found)
        searched.update(map(os.path.dirname, folders_of(spec.listed_splits[sharing])))
    unassigned |= _image_names(_parallel_folders(split_folders, folders, searched), spec, folders) - known
    return OtherImages(
        earlier=_places(spec, earlier),
        this=SplitPlaces((), _folders(spec, split, split_images), split_images.missing),
        later=_places(spec, later),
        unassigned=sorted(unassigned),
        missing_folders=[relative_name(entry, spec.root) for entry in entries_without_images(spec, split)],
    )


def _places(spec: DatasetSpec, splits: Mapping[str, SplitImages]) -> SplitPlaces:
    """Returns the places that several splits name. An image of several splits belongs to the first."""
    images: dict[str, FilesOfImage] = {}  # by name
    folders: list[str] = []
    missing: list[str] = []
    for split, found in splits.items():
        for name, file in found.images.items():
            files = (file, *found.aliases.get(name, ()))
            images.setdefault(name, tuple(each._replace(stamp=None) for each in files))
        folders += _folders(spec, split, found)
        missing += found.missing
    return SplitPlaces([images[name] for name in sorted(images)], folders, missing)


def _folders(spec: DatasetSpec, split: str, found: SplitImages) -> list[str]:
    """Returns the existing folders that a split names, and those that contain the images of its lists, see
    `SplitPlaces.folders`. These are the common folders of the images in each folder of the data set."""
    named = folders_of(spec.listed_splits[split])
    named_folders = ["" if folder == str(spec.root) else relative_name(folder, spec.root) for folder in named]
    prefixes = tuple(f"{folder}/" if folder else "" for folder in named_folders)
    listed: dict[str, list[str]] = {}  # by the first part of their paths
    for folder in {name.rpartition("/")[0] for name in found.images}:
        if folder and not f"{folder}/".startswith(prefixes):
            listed.setdefault(folder.partition("/")[0], []).append(folder)
    return [*named_folders, *sorted(map(os.path.commonpath, listed.values()))]


def _splits_with_same_file(spec: DatasetSpec, split: str) -> list[str]:
    """Returns the splits that have the same label file as ``split`` but other images."""
    splits = spec.listed_splits
    others = splits_with_other_images(spec, split)
    return [other for other in others if splits[other].annotations == splits[split].annotations]


def images_of_no_split(spec: DatasetSpec, split: str, folders: Folders, known: Collection[str]) -> list[str]:
    """Returns the sorted names of images that no split names, next to the folders of this split. ``known``: names of
    images to leave out, whose folders are searched if this split has a list."""
    named = folders_of(spec.listed_splits[split])
    searched = {Path(folder).parent for folder in named}
    if len(named) < len(spec.listed_splits[split].images):
        image_folders = {Path(path_of(name.rpartition("/")[0], spec.root)) for name in known}
        searched |= image_folders | {folder.parent for folder in image_folders}
    inside = (folder for folder in sorted(searched) if folder.is_relative_to(spec.root))
    return sorted(_image_names(inside, spec, folders).difference(known))


def _image_names(searched: Iterable[Path], spec: DatasetSpec, folders: Folders) -> set[str]:
    """Returns the names of all images in or below folders, except in the folders of splits directly in these. A folder
    is read once if ``searched`` names it after those that contain it."""
    suffixes = image_suffixes(spec.pixels)
    names: set[str] = set()
    visited: set[str] = set()
    for folder in searched:
        if str(folder) in visited:
            continue
        for path, entries in _walk_besides_splits(folder, spec, folders):
            visited.add(path)
            prefix = folders.name_in(path)
            names |= {prefix + entry.name for entry in entries if is_image(entry.name, suffixes)}
    return names


def _parallel_folders(split_folders: Sequence[str], folders: Folders, searched: Collection[str]) -> Iterator[Path]:
    """Yields the existing folders whose paths differ from one of ``split_folders`` in one part, such as ``test/images``
    from ``train/images``, if they can be read. ``searched``: folders directly in which all folders are known."""
    known = {path_of(folder, folders.root) for folder in split_folders}
    for above, rests in _rests_of_paths(split_folders, folders.root).items():
        inside = [entry.path for entry in folders.entries(above).values() if none_if_missing(entry.is_dir)]
        for path in itertools.chain.from_iterable(rests.existing(folder, folders) for folder in inside):
            is_searched = path in known or (os.path.dirname(path) == above and above in searched)
            if not is_searched and _entries_if_readable(path, folders):
                known.add(path)
                yield Path(path)


def _rests_of_paths(split_folders: Sequence[str], root: Path) -> dict[str, _PathTree]:
    """Returns what follows each part of the paths ``split_folders``, by the folder (absolute) above this part. For
    ``train/images``, this is ``images`` by the data set's folder ``root``, and the empty path by ``train``."""
    rests_of: dict[str, _PathTree] = {}
    for folder in split_folders:
        parts = folder.split("/")
        if parts[0] in ("", ".."):  # the data set's folder, or one outside
            continue
        for i in range(len(parts)):
            above = path_of("/".join(parts[:i]), root)
            rests_of.setdefault(above, _PathTree()).add(parts[i + 1 :])
    return rests_of


class _PathTree:
    """Relative paths as a tree, because looking up each path in each folder would take too long."""

    def __init__(self) -> None:
        self._is_end = False  # whether a path ends here
        self._below: dict[str, _PathTree] = {}

    def add(self, parts: Sequence[str]) -> None:
        tree = self
        for part in parts:
            tree = tree._below.setdefault(part, _PathTree())
        tree._is_end = True

    def existing(self, folder: str, folders: Folders) -> Iterator[str]:
        """Yields the paths that exist below ``folder``. Reads a folder only to look up what is in it."""
        if self._is_end:
            yield folder
        if self._below:
            entries = _entries_if_readable(folder, folders)
            for part in sorted(self._below.keys() & entries.keys()):
                yield from self._below[part].existing(os.path.join(folder, part), folders)


def _entries_if_readable(path: str, folders: Folders) -> Mapping[str, os.DirEntry]:
    """Returns the entries of a folder by name, or an empty dict if there is no such folder or it cannot be read."""
    try:
        return folders.entries(path)
    except UserError:
        return {}


def _walk_besides_splits(folder: Path, spec: DatasetSpec, folders: Folders) -> Iterator[tuple[str, list[os.DirEntry]]]:
    """Yields a folder and the folders below it, except split folders directly in it: their paths and entries."""
    split_entries = {entry for split in spec.listed_splits.values() for entry in split.images}
    entries = list(folders.entries(str(folder)).values())
    yield str(folder), entries
    for entry in entries:
        if none_if_missing(entry.is_dir) and Path(entry.path) not in split_entries:
            for visit in walk(Path(entry.path)):
                yield visit.path, visit.entries
