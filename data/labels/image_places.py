"""Finds the place where the image of an entry would be, if no split has it.

The places are rows of lists, the folders of splits, missing folders, and images of no split. The one whose folder
agrees best with those in the file name is taken. For example, two splits have images/train and images/val, and no split
has images/old:

- "val/9.png" agrees with images/val: the image is missing from this split.
- "images/old/9.png" agrees with images/old if this image exists: it is in no split. Else it may be missing from any.
- "9.png" agrees with no folder: the image may be missing from any split.

The places are the same whichever of the splits that share the label file is read. A loss that may be of several splits
is counted in the first of them.
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

Parts = tuple[str, ...]  # of a path, loose
Parents = tuple[Parts, ...]  # the folders in each reading of a file name


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


class Agreement(NamedTuple):
    """How well a folder agrees with the folders in a file name. The largest one is the best; an empty one is none."""

    num_common: int = 0  # last parts of the base that are consecutive folders in the file name
    starts_file_name: bool = False  # the file name begins with these
    num_below: int = 0  # parts below the base, which follow in the file name
    depth: int = 0  # number of folders in the file name up to the last one of the base


class ImagePlaces:
    """The places where images that a label file names may be.

    Args:
        images: images of all splits with this label file.
        others: other places.
        outer_folders: see `ImageNames.find`.
    """

    def __init__(self, images: Sequence[KnownImage], others: OtherImages, outer_folders: Sequence[str]) -> None:
        contents = {SplitOrder.EARLIER: others.earlier, SplitOrder.THIS: others.this, SplitOrder.LATER: others.later}
        self._outer_folders = outer_folders
        missing_rows = [(name, split) for split, content in contents.items() for name in content.missing]
        self._missing_rows = ImageNames.of_single_names(name for name, _ in missing_rows)
        self._unassigned = ImageNames.of_single_names(others.unassigned)
        self._folders_of_row = [_ImageFolders((_folder_of(name),), frozenset({split})) for name, split in missing_rows]
        self._folders_of_image = [
            _ImageFolders(tuple(_folder_of(file.name) for file in image.names), image.splits) for image in images
        ]
        self._folders_of_unassigned = [_ImageFolders((_folder_of(name),), frozenset()) for name in others.unassigned]

        self._named_folders = {folder for content in contents.values() for folder in content.folders}
        self._image_folders = {folder for image in self._folders_of_image for folder in image.folders}
        self._bases = _Bases([*self._named_folders, *others.missing_folders])
        self._missing_folders = _FolderTable()
        for folder in others.missing_folders:
            self._missing_folders.add_with_subfolders(_loose_parts(folder))
        self._split_folders = self._table_of(self._folders_of_image)
        for split, content in contents.items():
            for folder in content.folders:
                self._split_folders.add_with_subfolders(_loose_parts(folder), {split})
        self._closest: dict[_Evidence, Place] = {}

    def closest(self, file_name: str, matches: Iterable[int]) -> Place:
        """Returns the place whose folder agrees best with those in ``file_name``. ``matches``: images with this name.

        Several places that agree equally are preferred in this order: a missing image that a list names, the images of
        splits that have the file name, an image of no split, a missing folder, and the folders of splits. If an image
        of no split agrees only as well as the folder of a split that does not contain it, it may be another image of
        that name, which `PlaceKind.ELSEWHERE` says.
        """
        missing_rows = self._missing_rows.find(file_name, self._outer_folders)
        unassigned = self._unassigned.find(file_name, self._outer_folders)
        evidence = _Evidence(
            parents=_parents_of(file_name),
            missing_rows=tuple([self._folders_of_row[i] for i in missing_rows]),
            images=tuple([self._folders_of_image[i] for i in matches]),
            unassigned=tuple([self._folders_of_unassigned[i] for i in unassigned]),
        )
        if evidence not in self._closest:  # most file names share their folders
            self._closest[evidence] = self._closest_by(evidence)
        return self._closest[evidence]

    def _closest_by(self, evidence: _Evidence) -> Place:
        tables = [  # the preferred ones first, because `max` returns the first of several that agree equally
            (PlaceKind.LISTED, self._table_of(evidence.missing_rows)),
            (PlaceKind.SPLITS, self._table_of(evidence.images)),
            (PlaceKind.NO_SPLIT, self._table_of(evidence.unassigned)),
            (PlaceKind.ELSEWHERE, self._missing_folders),
            (PlaceKind.SPLITS, self._split_folders),
        ]
        parents = evidence.parents
        places = [(kind, *table.closest(parents)) for kind, table in tables if not table.is_empty]
        kind, agreement, splits = max(places, key=itemgetter(1))
        if kind is PlaceKind.NO_SPLIT and agreement == self._split_folders.closest(parents)[0]:
            folders = [folder for image in evidence.unassigned for folder in image.folders]
            if not any(self._is_in_split_folder(folder) for folder in folders):
                return Place(PlaceKind.ELSEWHERE)
        return Place(kind, splits, has_its_folders=agreement != Agreement())

    def _table_of(self, images: Iterable[_ImageFolders]) -> _FolderTable:
        """Returns the folders directly in which ``images`` are."""
        splits_of: dict[str, set[SplitOrder]] = {}
        for image in images:
            for folder in image.folders:
                splits_of.setdefault(folder, set()).update(image.splits)
        table = _FolderTable()
        for folder, splits in splits_of.items():
            table.add(self._bases.split(folder), splits)
        return table

    def _is_in_split_folder(self, folder: str) -> bool:
        """Returns whether a folder has images of splits, or is one that a split names, or below one."""
        return folder in self._image_folders or not self._named_folders.isdisjoint(_with_parents(folder))


class _ImageFolders(NamedTuple):
    """The folders and splits of an image, which decide whether it fits a place."""

    folders: tuple[str, ...]  # directly in which it is, under each of its names
    splits: frozenset[SplitOrder]  # all that have it


class _Evidence(NamedTuple):
    """What decides in which place the image of an entry would be."""

    parents: Parents
    # Images with the entry's file name, or as much of it as `ImageNames` needs:
    missing_rows: tuple[_ImageFolders, ...]  # that lists name, but that do not exist
    images: tuple[_ImageFolders, ...]  # of splits
    unassigned: tuple[_ImageFolders, ...]  # of no split


class _Folder(NamedTuple):
    """A folder all of whose images are known.

    The folder of a split, or one whose path differs from it in one part, is its base. Only the base shows to which
    split an image belongs: folders of several splits often have subfolders with the same names.
    """

    base: Parts
    below: Parts  # the rest of the path


class _Bases:
    """Splits the paths of folders into base and rest. ``folders``: those of splits, which may be missing."""

    def __init__(self, folders: Iterable[str]) -> None:
        self._patterns = {pattern for folder in folders for pattern in _patterns_of(folder)}

    def split(self, name: str) -> _Folder:
        """Splits a path after the longest base that differs from the folder of a split in at most one part: with
        images/train, images/old/a is the folder a below images/old. If there is none, all of the path is the base."""
        parts = _loose_parts(name)
        for num_below, folder in enumerate(_with_parents(name)):
            if not self._patterns.isdisjoint(_patterns_of(folder)):
                num_base = len(parts) - num_below
                return _Folder(parts[:num_base], parts[num_base:])
        return _Folder(parts, ())


def _patterns_of(folder: str) -> list[Parts]:
    """Returns the parts of a path, with a wildcard in place of each in turn: ("*", "val") and ("images", "*") for
    images/val. Two paths have a pattern in common if they differ in at most one part."""
    parts = tuple(folder.split("/")) if folder else ()
    return [(*parts[:i], "*", *parts[i + 1 :]) for i in range(len(parts))]


class _FolderTable:
    """Finds which of several folders agree best with a file name, and the splits to which these belong.

    It looks up parts of the file name, whatever the number of folders: there may be as many folders as file names.
    """

    def __init__(self) -> None:
        self._of_base: dict[_Folder, set[SplitOrder]] = {}  # splits by last parts of the base and all parts below
        self._of_end: dict[Parts, set[SplitOrder]] = {}  # by last parts below the base
        self._with_subfolders: dict[Parts, set[SplitOrder]] = {}  # by last parts
        self._all_splits: set[SplitOrder] = set()
        self._closest: dict[Parents, tuple[Agreement, frozenset[SplitOrder]]] = {}
        self.is_empty = True

    def add(self, folder: _Folder, splits: Set[SplitOrder] = frozenset()) -> None:
        """Adds a folder that belongs to ``splits``, without its subfolders."""
        for base in _ends_of(folder.base):
            self._of_base.setdefault(_Folder(base, folder.below), set()).update(splits)
        for below in _ends_of(folder.below):
            self._of_end.setdefault(below, set()).update(splits)
        self._all_splits |= splits
        self.is_empty = False

    def add_with_subfolders(self, parts: Parts, splits: Set[SplitOrder] = frozenset()) -> None:
        """Adds a folder that belongs to ``splits`` with all subfolders, even if these are missing."""
        for end in _ends_of(parts):
            self._with_subfolders.setdefault(end, set()).update(splits)
        self._all_splits |= splits
        self.is_empty = False

    def closest(self, parents: Parents) -> tuple[Agreement, frozenset[SplitOrder]]:
        """Returns the best agreement with ``parents``, and the splits whose folders have it: all if none agrees."""
        if parents not in self._closest:
            best = max((agreement for agreement, _ in self._agreeing(parents)), default=Agreement())
            splits = [splits for agreement, splits in self._agreeing(parents) if agreement == best]
            self._closest[parents] = best, frozenset().union(*(splits or [self._all_splits]))
        return self._closest[parents]

    def _agreeing(self, parents: Parents) -> Iterator[tuple[Agreement, set[SplitOrder]]]:
        """Yields the agreements of folders with the readings of a file name, and the splits of these folders.

        For example, the folder images/val/a has the base images/val and a below it. It agrees with the folders of

        - "images/val/a/9.png" and "/set/images/val/a/9.png" in a base of two parts and one part below,
        - "val/a/9.png" in a base of one part and one part below,
        - "a/9.png" in no part of the base and one part below, if the file name begins with it,
        - "train/a/9.png" and "images/val/9.png" not at all, if only this folder was added, without its subfolders or
          those that contain it.
        """
        for reading in parents:
            if reading in self._of_end:  # relative to the base, or to a folder below it
                yield Agreement(0, starts_file_name=True, num_below=len(reading)), self._of_end[reading]
            for depth in range(1, len(reading) + 1):
                below = reading[depth:]
                for base in _ends_of(reading[:depth]):
                    is_start = len(base) == depth
                    if _Folder(base, below) in self._of_base:
                        agreement = Agreement(len(base), is_start, len(below), depth)
                        yield agreement, self._of_base[_Folder(base, below)]
                    if base in self._with_subfolders:
                        yield Agreement(len(base), is_start, depth=depth), self._with_subfolders[base]


def _ends_of(parts: Parts) -> list[Parts]:
    """Returns all ends of a path, without the empty one."""
    return [parts[start:] for start in range(len(parts))]


def _folder_of(name: str) -> str:
    """Returns the folder of an image from its name."""
    return name.rpartition("/")[0]


def _parents_of(file_name: str) -> Parents:
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
