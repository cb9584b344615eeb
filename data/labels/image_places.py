"""Compares the places where the image of an entry may be, if no split has it: folders and list rows of the splits that
share the label file, images of no split, and missing folders.

The places are the same whichever of these splits is read, so that each loss is counted in one split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from data.labels.image_names import ImageNames, loose, readings_of
from data.split_files import NamesOfImage, OtherImages

Parts = tuple[str, ...]  # of a path, loose
Parents = tuple[Parts, ...]  # the folders in each reading of a file name


class SplitOrder(Enum):
    """The position of a split in the data set, relative to the split that is read."""

    EARLIER = auto()
    THIS = auto()
    LATER = auto()


class KnownImage(NamedTuple):
    """An image of any of the splits that share a label file."""

    names: NamesOfImage
    split: SplitOrder
    counted_in: SplitOrder  # the first split that has the image, in whose size it counts


class SplitSizes(NamedTuple):
    """Sizes, in images or entries, of the splits that share a label file, and thus its losses in proportion."""

    earlier: int = 0  # total of the splits before this one
    this: int = 0
    later: int = 0  # total of the splits after this one and of images in no split, whose share is not lost

    @classmethod
    def of_one(cls, split: SplitOrder) -> SplitSizes:
        """Returns the size of one image or folder of a split."""
        return cls(*(int(split is each) for each in SplitOrder))

    def plus(self, other: SplitSizes) -> SplitSizes:
        return SplitSizes(self.earlier + other.earlier, self.this + other.this, self.later + other.later)

    def share_of(self, count: int) -> range:
        """Returns the range of ``count`` losses that this split counts, so that each is counted once.

        All splits see the same losses in the same order, and each counts a range in proportion to its size. With three
        losses and splits of 60, 30 and 10 images, the first split counts losses 0 and 1, the second loss 2, and the
        third none.
        """
        total = self.earlier + self.this + self.later
        first = math.ceil(count * self.earlier / total)
        end = math.ceil(count * (self.earlier + self.this) / total)
        return range(first, end)


class PlaceKind(Enum):
    """The kinds of places where the image of an entry may be."""

    MISSING_LISTED = auto()  # a list names the image, which does not exist
    NO_SPLIT = auto()  # an image of no split
    MISSING_FOLDER = auto()
    SPLIT_FOLDERS = auto()


class Place(NamedTuple):
    """Where the image of an entry would be."""

    kind: PlaceKind
    split: SplitOrder | None = None  # the split whose list names the image
    folders: frozenset[str] = frozenset()  # of splits; several if they agree equally


class _Folder(NamedTuple):
    """A folder in which the image of an entry may be.

    The folder of a split, or one whose path differs from it in one part, is its base. Only the base shows to which
    split an image belongs: folders of several splits often have subfolders with the same names.
    """

    name: str
    base: Parts
    below: Parts = ()  # the rest of the path
    is_walked: bool = False  # whether images in its subfolders, which may be missing, belong to it, too


class Agreement(NamedTuple):
    """How well a folder agrees with the folders in a file name. The largest one is the best."""

    num_common: int = 0  # last parts of the base that are consecutive folders in the file name
    is_from_start: bool = False  # the file name begins with these
    num_below: int = 0  # parts below the base, which follow in the file name
    depth: int = 0  # number of folders in the file name up to the last one of the base


def agreement_of(folder: _Folder, parents: Parents) -> Agreement:
    """Returns the best agreement of ``folder`` with a reading of a file name. An empty agreement is none.

    Below a walked "images/val", the image "images/val/a/x" is called "val/a/x" or "a/x", but not "train/a/x".
    """
    best = Agreement()
    num_below = len(folder.below)
    for reading in parents:
        if reading and folder.below[-len(reading) :] == reading:  # relative to the base, or to a folder below it
            best = max(best, Agreement(0, is_from_start=True, num_below=len(reading)))
        if reading[len(reading) - num_below :] != folder.below:
            continue
        last = len(reading) - num_below
        for depth in range(1 if folder.is_walked else last, last + 1):
            num_common = _num_common(folder.base, reading[:depth])
            if num_common:
                best = max(best, Agreement(num_common, num_common == depth, num_below, depth))
    return best


class ImagePlaces:
    """The places where images that a label file names may be.

    Args:
        images: images of all splits with this label file.
        others: other places.
    """

    def __init__(self, images: Sequence[KnownImage], others: OtherImages) -> None:
        contents = {SplitOrder.EARLIER: others.earlier, SplitOrder.THIS: others.this, SplitOrder.LATER: others.later}
        missing_listed = [(name, split) for split, content in contents.items() for name in content.missing]
        self._missing_listed = ImageNames.of_single_names(name for name, _ in missing_listed)
        self._split_of_missing = [split for _, split in missing_listed]
        self._unassigned = ImageNames.of_single_names(others.unassigned)

        self._num_owners: dict[str, SplitSizes] = {}  # number of splits that name a folder, by folder
        for split, content in contents.items():
            for folder in content.folders:
                _add(self._num_owners, folder, SplitSizes.of_one(split))
        num_images: dict[str, SplitSizes] = {}  # by folder, without its subfolders
        for image in images:
            for file in image.names:
                _add(num_images, _folder_of(file.name), SplitSizes.of_one(image.counted_in))
        self._num_images: dict[str, SplitSizes] = {}  # by folder, with its subfolders
        for folder, size in num_images.items():
            for containing in _with_parents(folder):
                _add(self._num_images, containing, size)

        self._bases = _Bases([*self._num_owners, *others.missing_folders])
        self._missing_folders = _FolderTable([_walked(folder) for folder in others.missing_folders])
        split_folders = {folder: self._bases.folder(folder) for folder in num_images}
        split_folders |= {folder: _walked(folder) for folder in self._num_owners}
        self._split_folders = _FolderTable(list(split_folders.values()))

    def closest(self, file_name: str, matches: Sequence[KnownImage]) -> Place:
        """Returns the place whose folder agrees best with those in ``file_name``. Several places that agree equally are
        preferred in this order: a missing image that a list names, the images of splits that have the file name
        (``matches``), an image of no split near them, a missing folder, the folders of splits, and an image of no split
        farther away, which may be of another data set."""
        parents = _parents_in(file_name)
        places: list[tuple[Agreement, Place]] = []
        for number in self._missing_listed.find(file_name):
            agreement = self._agreement_of_listed(_folder_of(self._missing_listed.name(number)), parents)
            places.append((agreement, Place(PlaceKind.MISSING_LISTED, split=self._split_of_missing[number])))
        if matches:
            folders = {_folder_of(file.name) for image in matches for file in image.names}
            agreement, names = _closest_of(map(self._bases.folder, folders), parents)
            places.append((agreement, Place(PlaceKind.SPLIT_FOLDERS, folders=names)))
        unassigned = [_folder_of(self._unassigned.name(number)) for number in self._unassigned.find(file_name)]
        of_no_split = [
            (agreement_of(self._bases.folder(name), parents), Place(PlaceKind.NO_SPLIT)) for name in unassigned
        ]
        places += [place for name, place in zip(unassigned, of_no_split) if self._bases.is_near(name)]
        if self._missing_folders:
            agreement, _ = self._missing_folders.closest(parents)
            places.append((agreement, Place(PlaceKind.MISSING_FOLDER)))
        agreement, names = self._split_folders.closest(parents)
        places.append((agreement, Place(PlaceKind.SPLIT_FOLDERS, folders=names)))
        places += [place for name, place in zip(unassigned, of_no_split) if not self._bases.is_near(name)]
        _, best = max(places, key=lambda rated: rated[0])  # the first of several
        return best

    def _agreement_of_listed(self, folder: str, parents: Parents) -> Agreement:
        """Returns the agreement of a missing image's folder, as its list names it: all of it, which may be a path of
        another machine, or only its base and the parts below."""
        whole = _Folder(folder, base=_loose_parts(folder))
        agreement = agreement_of(whole, parents)
        if agreement.is_from_start or agreement.num_common == len(whole.base):
            return agreement
        return agreement_of(self._bases.folder(folder), parents)

    def sizes(self, folders: frozenset[str]) -> SplitSizes:
        """Returns the number of images that the splits have in or below ``folders``, or if there are none, the number
        of splits that name these folders."""
        outermost = [folder for folder in folders if folders.isdisjoint(_with_parents(folder)[1:])]
        total = SplitSizes()
        for folder in outermost:
            total = total.plus(self._num_images.get(folder, SplitSizes()))
        if not any(total):
            for folder in folders:
                total = total.plus(self._num_owners[folder])
        return total


class _Bases:
    """Splits the paths of folders into base and rest, see `_Folder`. ``walked``: the folders of splits."""

    def __init__(self, walked: Sequence[str]) -> None:
        self._parents = {_folder_of(folder) for folder in walked if folder}
        self._patterns = {pattern for folder in walked for pattern in _patterns_of(folder)}

    def folder(self, name: str) -> _Folder:
        """Returns a folder all of whose images are known. Its base differs from the folder of a split in at most one
        part; if there is no such base, it is all of the path."""
        parts = _loose_parts(name)
        bases = (
            i for i, folder in enumerate(_with_parents(name)) if not self._patterns.isdisjoint(_patterns_of(folder))
        )
        num_base = len(parts) - next(bases, 0)
        return _Folder(name, parts[:num_base], parts[num_base:])

    def is_near(self, name: str) -> bool:
        """Returns whether a folder is that of a split or next to it, or below such a folder."""
        return any(_folder_of(folder) in self._parents for folder in _with_parents(name)[:-1])


def _patterns_of(folder: str) -> list[Parts]:
    """Returns the parts of a path, with a wildcard in place of each in turn."""
    parts = tuple(folder.split("/")) if folder else ()
    return [(*parts[:i], "*", *parts[i + 1 :]) for i in range(len(parts))]


class _FolderTable:
    """Finds the folders that agree best with a file name. A search reads only folders that agree: there may be as many
    folders as file names."""

    def __init__(self, folders: Sequence[_Folder]) -> None:
        self._names = frozenset(folder.name for folder in folders)
        self._closest: dict[Parents, tuple[Agreement, frozenset[str]]] = {}  # results; most file names share folders
        self._by_end: dict[Parts, list[_Folder]] = {}  # by the last part of the base, and those below it
        self._by_start: dict[Parts, list[_Folder]] = {}  # by the last parts below the base
        for folder in folders:
            if folder.base:
                self._by_end.setdefault((folder.base[-1], *folder.below), []).append(folder)
            for start in range(len(folder.below)):
                self._by_start.setdefault(folder.below[start:], []).append(folder)

    def __len__(self) -> int:
        return len(self._names)

    def closest(self, parents: Parents) -> tuple[Agreement, frozenset[str]]:
        """Returns the best agreement with ``parents`` and the folders that have it; all folders if none agrees."""
        if parents not in self._closest:
            best, names = _closest_of(self._that_may_agree(parents), parents)
            if best == Agreement():
                names = self._names
            self._closest[parents] = best, names
        return self._closest[parents]

    def _that_may_agree(self, parents: Parents) -> list[_Folder]:
        folders: list[_Folder] = []
        for reading in parents:
            ends = {reading[start:] for start in range(len(reading))} | {(part,) for part in reading}
            for end in ends:
                folders += self._by_end.get(end, [])
            folders += self._by_start.get(reading, [])
        return folders


def _walked(name: str) -> _Folder:
    return _Folder(name, _loose_parts(name), is_walked=True)


def _closest_of(folders: Iterable[_Folder], parents: Parents) -> tuple[Agreement, frozenset[str]]:
    """Returns the best agreement with ``parents`` among ``folders``, and the names of the folders that have it."""
    agreements = {folder.name: agreement_of(folder, parents) for folder in folders}
    best = max(agreements.values(), default=Agreement())
    return best, frozenset(name for name, agreement in agreements.items() if agreement == best)


def _add(sizes: dict[str, SplitSizes], folder: str, size: SplitSizes) -> None:
    sizes[folder] = sizes.get(folder, SplitSizes()).plus(size)


def _num_common(first: Parts, second: Parts) -> int:
    """Returns how many last parts of two paths are the same."""
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return count


def _folder_of(name: str) -> str:
    """Returns the folder of an image, or of a folder, from its name."""
    return name.rpartition("/")[0]


def _parents_in(file_name: str) -> Parents:
    return tuple(dict.fromkeys(tuple(map(loose, parts[:-1])) for parts in readings_of(file_name)))


def _loose_parts(folder: str) -> Parts:
    return tuple(loose(part) for part in folder.split("/") if part not in ("", ".", ".."))


def _with_parents(folder: str) -> list[str]:
    """Returns a folder and those that contain it, the closest first and the data set's folder "" last."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]
