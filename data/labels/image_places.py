"""Decides where the image of an entry would be, if it is not among the images of the splits (`ImagePlaces`).

The places are rows of lists, images of no split, missing folders, and folders of splits. The one whose folders agree
best with those in the file name is taken. For example, two splits have images/train and images/val, which has a
subfolder a, and no split has images/old:

- "val/9.png" agrees with images/val: the image is missing from this split.
- "a/9.png" agrees with images/val/a, which no other split has: the image is missing from val.
- "images/old/9.png" agrees with images/old if this image exists: it is of no split. Else it may be missing from any.
- "9.png" agrees with no folder: the image may be missing from any split.

The places are the same whichever of the splits that share the label file is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from enum import Enum, auto
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from data.labels.image_names import ImageNames, loose, readings_of
from data.labels.known_images import KnownImage, SplitOrder
from data.split_files import OtherImages

Parts = tuple[str, ...]  # of the path of a folder, loose
Readings = tuple[Parts, ...]  # the folders in each reading of a file name


class PlaceKind(Enum):
    """The kinds of places where the image of an entry may be."""

    LISTED = auto()  # a list names the image, which does not exist
    SPLITS = auto()  # a folder of a split, or folders of several that agree equally
    NO_SPLIT = auto()  # the image exists, but no split names it
    ELSEWHERE = auto()  # a missing folder, or perhaps an image of no split


class Place(NamedTuple):
    """Where the image of an entry would be."""

    kind: PlaceKind
    splits: frozenset[SplitOrder] = frozenset()  # that may have the image
    has_its_folders: bool = True  # whether a folder of the file name agrees: else the image may be anywhere


class ImagePlaces:
    """The places where images that a label file names may be.

    Args:
        images: images of all splits with this label file.
        others: other places.
        outer_folders: see `ImageNames.find`.
    """

    def __init__(self, images: Sequence[KnownImage], others: OtherImages, outer_folders: Sequence[str]) -> None:
        contents = {SplitOrder.EARLIER: others.earlier, SplitOrder.THIS: others.this, SplitOrder.LATER: others.later}
        rows = [(name, {split}) for split, content in contents.items() for name in content.missing]
        self._rows = _NamedFolders(rows, outer_folders)
        self._unassigned = _NamedFolders([(name, set()) for name in others.unassigned], outer_folders)
        self._images = [_ImageFolders.of([file.name for file in image.files], image.splits) for image in images]

        self._with_images = {folder for image in self._images for folder in image.folders}
        self._named_folders = {folder for content in contents.values() for folder in content.folders}
        self._subfolders = _Subfolders([*self._named_folders, *others.missing_folders])
        self._missing_folders = _FolderTable()
        for folder in others.missing_folders:
            self._missing_folders.add_with_subfolders(folder)
        self._split_folders = self._table_of(self._images)
        for split, content in contents.items():
            for folder in content.folders:
                self._split_folders.add_with_subfolders(folder, {split})
        self._places: dict[_Evidence, Place] = {}

    def closest(self, file_name: str, matches: Iterable[int]) -> Place:
        """Returns the place whose folders agree best with those in ``file_name``. ``matches``: images with this name.

        Several places that agree equally are preferred in this order: a missing image that a list names, the images of
        splits that have the file name, an image of no split, a missing folder, and the folders of splits.
        """
        evidence = _Evidence(
            readings=_folders_of(file_name),
            rows=self._rows.find(file_name),
            images=tuple([self._images[i] for i in matches]),
            unassigned=self._unassigned.find(file_name),
        )
        if evidence not in self._places:  # most file names share their folders
            self._places[evidence] = self._place_by(evidence)
        return self._places[evidence]

    def _place_by(self, evidence: _Evidence) -> Place:
        """Returns the place that agrees best with a file name.

        For example, val has the only image 9.png, in images/val/a, and images/test is missing. "val/a/9.png" agrees
        with the folder of the image and with images/val in one folder each, but with the former also in a subfolder:
        SPLITS, val. "test/9.png" agrees with images/test alone: ELSEWHERE.
        """
        tables = [  # the preferred ones first, because `max` returns the first of several that agree equally
            (PlaceKind.LISTED, self._table_of(evidence.rows)),
            (PlaceKind.SPLITS, self._table_of(evidence.images)),
            (PlaceKind.NO_SPLIT, self._table_of(evidence.unassigned)),
            (PlaceKind.ELSEWHERE, self._missing_folders),
            (PlaceKind.SPLITS, self._split_folders),
        ]
        places = [(kind, *table.closest(evidence.readings)) for kind, table in tables if not table.is_empty]
        kind, agreement, splits = max(places, key=itemgetter(1))
        if kind is PlaceKind.NO_SPLIT and self._may_be_of_a_split(evidence, agreement):
            return Place(PlaceKind.ELSEWHERE)
        return Place(kind, splits, has_its_folders=agreement != _NO_AGREEMENT)

    def _may_be_of_a_split(self, evidence: _Evidence, agreement: _Agreement) -> bool:
        """Returns whether an entry may be of another image than that of no split which it matches, because the folder
        of a split without this image agrees as well: "9.png" may be images/old/9.png or missing from train."""
        if agreement != self._split_folders.closest(evidence.readings)[0]:
            return False
        return not any(self._is_in_split(folder) for image in evidence.unassigned for folder in image.folders)

    def _is_in_split(self, folder: str) -> bool:
        """Returns whether a folder has images of splits, or is one that a split names, or below one."""
        return folder in self._with_images or not self._named_folders.isdisjoint(_with_parents(folder))

    def _table_of(self, images: Iterable[_ImageFolders]) -> _FolderTable:
        """Returns the folders directly in which ``images`` are."""
        splits_of: dict[str, set[SplitOrder]] = {}
        for image in images:
            for folder in image.folders:
                splits_of.setdefault(folder, set()).update(image.splits)
        table = _FolderTable()
        for folder, splits in splits_of.items():
            table.add(folder, self._subfolders.count(folder), splits)
        return table


class _ImageFolders(NamedTuple):
    """The folders and splits of an image."""

    folders: tuple[str, ...]  # directly in which it is, under each of its names
    splits: frozenset[SplitOrder]  # all that have it

    @classmethod
    def of(cls, names: Iterable[str], splits: Set[SplitOrder]) -> _ImageFolders:
        return cls(tuple([name.rpartition("/")[0] for name in names]), frozenset(splits))


class _NamedFolders:
    """Finds the folders of images by their file names. ``images``: names and splits; ``outer_folders``: see
    `ImageNames.find`."""

    def __init__(self, images: Sequence[tuple[str, Set[SplitOrder]]], outer_folders: Sequence[str]) -> None:
        self._names = ImageNames.of_single_names(name for name, _ in images)
        self._folders = [_ImageFolders.of([name], splits) for name, splits in images]
        self._outer_folders = outer_folders

    def find(self, file_name: str) -> tuple[_ImageFolders, ...]:
        """Returns the folders of the images that match ``file_name``."""
        return tuple([self._folders[i] for i in self._names.find(file_name, self._outer_folders)])


class _Evidence(NamedTuple):
    """What decides in which place the image of an entry would be: folders in its file name, and the images that have
    this name, or as much of it as `ImageNames` needs."""

    readings: Readings
    rows: tuple[_ImageFolders, ...]  # images that lists name, but that do not exist
    images: tuple[_ImageFolders, ...]  # images of splits
    unassigned: tuple[_ImageFolders, ...]  # images of no split


class _Subfolders:
    """Counts the last folders of a path that are below the folder of a split, or below one whose path differs from it
    in one part: 1 for images/train/a and images/old/a with the split images/train.

    They do not show to which split an image belongs, because folders of several splits often have subfolders with the
    same names. ``folders``: those of splits, which may be missing.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._patterns = {pattern for folder in folders for pattern in _patterns_of(folder)}

    def count(self, name: str) -> int:
        """Returns the number of such folders of a path, 0 if no part of it is like the folder of a split."""
        for number, folder in enumerate(_with_parents(name)):
            if not self._patterns.isdisjoint(_patterns_of(folder)):
                return number
        return 0


def _patterns_of(folder: str) -> list[Parts]:
    """Returns the parts of a path, with a wildcard in place of each in turn: ("*", "val") and ("images", "*") for
    images/val. Two paths have a pattern in common if they differ in at most one part."""
    parts = tuple(folder.split("/")) if folder else ()
    return [(*parts[:i], "*", *parts[i + 1 :]) for i in range(len(parts))]


class _Agreement(NamedTuple):
    """How well a folder agrees with the folders in a file name. The largest one is the best.

    For example, the folder images/val/a has the subfolder a. It agrees with the folders of

    - "images/val/a/9.png" and "/set/images/val/a/9.png" in two folders and one subfolder,
    - "val/a/9.png" in one folder and one subfolder,
    - "a/9.png" in no folder and one subfolder, because the file name begins with it,
    - "train/a/9.png" and "images/val/9.png" not at all.
    """

    num_folders: int  # last folders in common, without subfolders
    starts_file_name: bool  # whether the file name begins with these
    num_subfolders: int  # in common
    depth: int  # number of folders in the file name up to the subfolders


_NO_AGREEMENT = _Agreement(0, starts_file_name=False, num_subfolders=0, depth=0)


class _FolderTable:
    """Finds which of several folders agree best with a file name, and the splits to which these belong.

    It looks up the ends of paths, whatever the number of folders: there may be as many folders as file names.
    """

    def __init__(self) -> None:
        self._folders: dict[Parts, dict[int, set[SplitOrder]]] = {}  # splits by end, and by number of subfolders
        self._with_subfolders: dict[Parts, set[SplitOrder]] = {}  # splits by end
        self._all_splits: set[SplitOrder] = set()
        self._closest: dict[Readings, tuple[_Agreement, frozenset[SplitOrder]]] = {}
        self.is_empty = True

    def add(self, folder: str, num_subfolders: int, splits: Set[SplitOrder]) -> None:
        """Adds a folder that belongs to ``splits``, without those below it. ``num_subfolders``: see `_Subfolders`."""
        for end in _ends_of(_loose_parts(folder)):
            self._folders.setdefault(end, {}).setdefault(num_subfolders, set()).update(splits)
        self._all_splits |= splits
        self.is_empty = False

    def add_with_subfolders(self, folder: str, splits: Set[SplitOrder] = frozenset()) -> None:
        """Adds a folder that belongs to ``splits`` with all subfolders, even if these are missing."""
        for end in _ends_of(_loose_parts(folder)):
            self._with_subfolders.setdefault(end, set()).update(splits)
        self._all_splits |= splits
        self.is_empty = False

    def closest(self, readings: Readings) -> tuple[_Agreement, frozenset[SplitOrder]]:
        """Returns the best agreement with the folders of a file name, and the splits whose folders have it: all if none
        agrees."""
        if readings not in self._closest:
            found = [each for folders in readings for each in self._agreeing(folders)]
            best = max((agreement for agreement, _ in found), default=_NO_AGREEMENT)
            splits = [splits for agreement, splits in found if agreement == best]
            self._closest[readings] = best, frozenset().union(*(splits or [self._all_splits]))
        return self._closest[readings]

    def _agreeing(self, folders: Parts) -> Iterator[tuple[_Agreement, set[SplitOrder]]]:
        """Yields the agreements with the folders of a file name, and the splits whose folders have them.

        For example, the table has images/val/a with its one subfolder. The folders (old, val, a) end like it in (val,
        a), which is one folder and one subfolder, and in (a), which could be that of any split and does not count
        because the file name does not begin with it. (a) alone counts as one subfolder.
        """
        for end in _ends_of(folders):
            is_start = len(end) == len(folders)
            for num_subfolders, splits in self._folders.get(end, {}).items():
                if is_start or len(end) > num_subfolders:
                    below = min(num_subfolders, len(end))
                    yield _Agreement(len(end) - below, is_start, below, len(folders) - below), splits
        for depth in range(1, len(folders) + 1):
            for end in _ends_of(folders[:depth]):
                if end in self._with_subfolders:
                    is_start = len(end) == depth
                    yield _Agreement(len(end), is_start, 0, depth), self._with_subfolders[end]


def _ends_of(parts: Parts) -> list[Parts]:
    """Returns all ends of a path, without the empty one."""
    return [parts[start:] for start in range(len(parts))]


def _folders_of(file_name: str) -> Readings:
    """Returns the folders in each reading of a file name."""
    return tuple(dict.fromkeys([_all_loose(parts[:-1]) for parts in readings_of(file_name)]))


@lru_cache  # most file names share their folders
def _all_loose(parts: Parts) -> Parts:
    return tuple(map(loose, parts))


def _loose_parts(folder: str) -> Parts:
    return tuple(loose(part) for part in folder.split("/") if part not in ("", ".", ".."))


def _with_parents(folder: str) -> list[str]:
    """Returns a folder and those that contain it, the closest first and the data set's folder "" last."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]
