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

Parents = tuple[tuple[str, ...], ...]  # the folders, loose, in each reading of a file name


class Origin(Enum):
    """The split that an image, a folder or a list row belongs to."""

    EARLIER_SPLIT = auto()
    THIS_SPLIT = auto()
    LATER_SPLIT = auto()


class NamedOrigin(NamedTuple):
    """An image that a label file may name, and the splits it belongs to."""

    names: NamesOfImage
    origin: Origin
    first_origin: Origin  # the first split that has the image, in whose size it counts


class SplitSizes(NamedTuple):
    """Sizes, in images or entries, of the splits that share a label file, and thus its losses in proportion."""

    earlier: int = 0  # total of the splits before this one
    this: int = 0
    later: int = 0  # total of the splits after this one and of images in no split, whose share is not lost

    @classmethod
    def of_one(cls, origin: Origin) -> SplitSizes:
        """Returns the size of one image or folder of a split."""
        return cls(*(int(origin is each) for each in Origin))

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


class Agreement(NamedTuple):
    """How well a folder agrees with the folders in a file name. The largest one is the best."""

    num_common: int = 0  # last parts of the folder's path that are consecutive folders in the file name
    is_from_start: bool = False  # the file name begins with these
    depth: int = 0  # number of folders in the file name up to the last common one


class PlaceKind(Enum):
    """The kinds of places where the image of an entry may be."""

    LIST_ROW = auto()  # a row of a list names this image, which does not exist
    NO_SPLIT = auto()  # an image of no split
    MISSING_FOLDER = auto()
    SPLIT_FOLDERS = auto()


class Place(NamedTuple):
    """Where the image of an entry would be."""

    kind: PlaceKind
    origin: Origin | None = None  # of a list row
    folders: frozenset[str] = frozenset()  # of splits; several if they agree equally


class ImagePlaces:
    """The places where images that a label file names may be.

    Args:
        images: images of all splits with this label file.
        others: other places.
    """

    def __init__(self, images: Sequence[NamedOrigin], others: OtherImages) -> None:
        self._unassigned = ImageNames.of_single_names(others.unassigned)
        self._missing_folders = _FolderTable(others.missing_folders, ())
        contents = {
            Origin.EARLIER_SPLIT: others.earlier,
            Origin.THIS_SPLIT: others.this,
            Origin.LATER_SPLIT: others.later,
        }
        rows = [(name, origin) for origin, content in contents.items() for name in content.missing]
        self._rows = ImageNames.of_single_names(name for name, _ in rows)
        self._row_origins = [origin for _, origin in rows]
        self._num_images: dict[str, SplitSizes] = {}  # by folder, without its subfolders
        for image in images:
            for file in image.names:
                folder = _folder_of(file.name)
                size = self._num_images.get(folder, SplitSizes())
                self._num_images[folder] = size.plus(SplitSizes.of_one(image.first_origin))
        self._owners: dict[str, SplitSizes] = {}  # number of splits that name a folder, by folder
        for origin, content in contents.items():
            for folder in content.folders:
                size = self._owners.get(folder, SplitSizes())
                self._owners[folder] = size.plus(SplitSizes.of_one(origin))
        self._split_folders = _FolderTable(self._owners, self._num_images)

    def closest(self, file_name: str, matches: Sequence[NamedOrigin]) -> Place:
        """Returns the place whose folders agree best with those in ``file_name``. Of equal places, a list row comes
        first, then an image of no split, a missing folder, and the splits' folders. If an existing image of a split has
        the file name (``matches``), images of no split and missing folders must agree better than the splits' do."""
        parents = _parents_in(file_name)
        in_missing, _ = self._missing_folders.closest(parents)
        in_splits, folders = self._split_folders.closest(parents)
        names = [file.name for image in matches for file in image.names]
        of_matches = max((_agreement_of(name, parents) for name in names), default=Agreement())
        row = _best_match(self._rows, file_name, parents)
        image = _best_match(self._unassigned, file_name, parents)
        if row and row.agreement < max(in_missing, in_splits):
            row = None
        if image and (image.agreement < max(in_missing, in_splits) or (matches and image.agreement <= of_matches)):
            image = None
        if row and (image is None or row.agreement >= image.agreement):
            return Place(PlaceKind.LIST_ROW, origin=self._row_origins[row.number])
        if image:
            return Place(PlaceKind.NO_SPLIT)
        if self._missing_folders and (in_missing > in_splits or (in_missing == in_splits and not matches)):
            return Place(PlaceKind.MISSING_FOLDER)
        return Place(PlaceKind.SPLIT_FOLDERS, folders=folders.intersection(map(_folder_of, names)) or folders)

    def sizes(self, folders: frozenset[str]) -> SplitSizes:
        """Returns the number of images that the splits have in or below ``folders``, or if there are none, the number
        of splits that name these folders."""
        total = SplitSizes()
        for folder, size in self._num_images.items():
            if not folders.isdisjoint(_with_parents(folder)):
                total = total.plus(size)
        if not any(total):
            for folder in folders:
                total = total.plus(self._owners[folder])
        return total


class _FolderTable:
    """Finds the folders that agree best with a file name.

    Args:
        walked: folders that contain all images below them.
        others: folders that contain images directly in them. They may be below walked ones.
    """

    def __init__(self, walked: Iterable[str], others: Iterable[str]) -> None:
        walked = frozenset(walked)
        self._all = walked.union(others)
        self._by_tail: dict[tuple[str, ...], list[str]] = {}  # by last parts of the path
        self._walked_by_tail: dict[tuple[str, ...], list[str]] = {}  # without ``others``
        self._closest: dict[Parents, tuple[Agreement, frozenset[str]]] = {}  # results; most file names share folders
        self._num_below_walked: dict[str, int] = {}  # parts of a folder's path below the walked folder
        for folder in self._all:
            containing = _with_parents(folder)
            self._num_below_walked[folder] = next((i for i, name in enumerate(containing) if name in walked), 0)
            parts = _loose_parts(folder)
            for start in range(len(parts)):
                self._by_tail.setdefault(parts[start:], []).append(folder)
                if folder in walked:
                    self._walked_by_tail.setdefault(parts[start:], []).append(folder)

    def __len__(self) -> int:
        return len(self._all)

    def closest(self, parents: Parents) -> tuple[Agreement, frozenset[str]]:
        """Returns the best agreement with ``parents`` and the folders that have it; all folders if none agrees."""
        if parents not in self._closest:
            self._closest[parents] = self._find_closest(parents)
        return self._closest[parents]

    def _find_closest(self, parents: Parents) -> tuple[Agreement, frozenset[str]]:
        best = Agreement()
        folders = self._all
        for reading in parents:
            for depth in range(1, len(reading) + 1):
                for start in range(depth):
                    common = reading[start:depth]
                    agreement = Agreement(len(common), start == 0, depth)
                    if agreement < best:
                        break
                    if depth < len(reading):
                        names = frozenset(self._walked_by_tail.get(common, ()))
                    else:
                        candidates = self._by_tail.get(common, ())
                        names = frozenset(name for name in candidates if self._fits(name, common, reading))
                    if names:
                        folders = folders | names if agreement == best else names
                        best = agreement
                        break
        return best, folders

    def _fits(self, folder: str, common: Sequence[str], reading: Sequence[str]) -> bool:
        """Returns whether a folder may be the one that a file name means with the folders ``reading``, of which the
        last ones are ``common``: below "images/val", "a" is meant by "a" and by "x/val/a", but not by "train/a"."""
        return len(common) == len(reading) or len(common) > self._num_below_walked[folder]


def _folder_of(name: str) -> str:
    """Returns the folder of an image, from its name."""
    return name.rpartition("/")[0]


class _Match(NamedTuple):
    number: int  # of the image
    agreement: Agreement


def _best_match(images: ImageNames, file_name: str, parents: Parents) -> _Match | None:
    """Returns the image that matches ``file_name`` and agrees best, the first of several, or None if none matches."""
    matches = [_Match(image, _agreement_of(images.name(image), parents)) for image in images.find(file_name)]
    return max(matches, key=lambda match: match.agreement, default=None)


def _agreement_of(name: str, parents: Parents) -> Agreement:
    """Returns how well the folder of the existing or listed image ``name`` agrees with ``parents``."""
    folder = _loose_parts(_folder_of(name))
    best = Agreement()
    for reading in parents:
        depth = len(reading)
        num_common = 0
        while num_common < min(depth, len(folder)) and reading[-1 - num_common] == folder[-1 - num_common]:
            num_common += 1
        if num_common:
            best = max(best, Agreement(num_common, num_common == depth, depth))
    return best


def _parents_in(file_name: str) -> Parents:
    return tuple(dict.fromkeys(tuple(map(loose, parts[:-1])) for parts in readings_of(file_name)))


def _loose_parts(folder: str) -> tuple[str, ...]:
    return tuple(loose(part) for part in folder.split("/") if part not in ("", ".", ".."))


def _with_parents(folder: str) -> list[str]:
    """Returns a folder and those that contain it, the closest first and the data set's folder "" last."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]
