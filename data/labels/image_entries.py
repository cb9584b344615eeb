"""Matches the image entries of a label file, which several splits may share, with the images of a split.

`match_entries` follows this rule:

1. An entry whose file name is literally that of an image, relative to the data set's folder or to its split's, is of
   this image.
2. Any other entry is a candidate for the only image that it matches by name (`ImageNames`).
3. A candidate is in another folder if its folders contradict that of the image's split. Either the image was moved, or
   the entry is of a missing image of the same name. Such candidates are used, and reported, unless their folders repeat
   names of the images' own entries, as if each split were numbered from 0: then none of them is used.
4. Of several candidates for an image, the one whose folders agree best is used, one in another folder only if all are.
   If several agree equally and have different labels, none is used: they are a conflict. If the entries of some folders
   conflict for several images, the candidates of these folders for other images are reported as well.
5. An entry that is not used belongs to the place where its image would be (`ImagePlaces`). This is its
   `UnmatchedReason`, from which `per_split` derives what is lost.

For example, train has images/train/0.png and 1.png, val has images/val/2.png, and "images/train/0.png" and
"images/val/2.png" are entries. This is what becomes of one more entry:

    file name            what the file name tells                              used for    lost
    images/train/1.png   literally the name of an image                        1.png       -
    1.png, train/1.png   the only image of this name                           1.png       -
    test/1.png           the same; as train is called images/train here,
                         test is another folder                                1.png, and reported
    train/0.png          the only image of this name, which has an entry       -           in train
    val/0.png            the same, but the folder is that of val               -           in val
    val/9.png            no image, but the folder of val                       -           in val
    9.png, test/9.png    no image, and no folder of a split                    -           in the first split
    images/old/9.png     an image of no split, if this file exists             -           nothing
    9.png                no image, but perhaps images/old/9.png, if it exists  -           nothing, but reported
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from data.labels.image_names import ImageNames, common_folders, loose, num_folders
from data.labels.image_places import ImagePlaces, KnownImage, Place, PlaceKind, SplitOrder
from data.labels.label_format import LabelRequest
from data.labels.rows import ROW_NUMBER, LabelRow, RawLabels, RowProblem
from data.split_files import ImageFile, OtherImages

ImageNumber: TypeAlias = int  # position among the images of all splits, see `_images_of_splits`
_MAX_REPEATED_SHARE = 0.01  # of the names in other folders, see `_do_names_repeat`


class ImageEntry(NamedTuple):
    """An image in the label file of a split."""

    file_name: str  # with /
    image_id: int | str
    labels: RawLabels

    @property
    def num_labeled(self) -> int:
        """Number of annotations, usable or not."""
        return self.labels.num_labeled

    @property
    def normal_name(self) -> str:
        """The file name as a path without "." and "..", to be compared with the names of images."""
        return os.path.normpath(self.file_name)

    @property
    def folder(self) -> str:
        """The folder of the file name, "" if it has none."""
        return os.path.dirname(self.normal_name)


class UnmatchedReason(Enum):
    """Why an entry belongs to no image of any split. If its image does not exist, the reason names the place where it
    would be, see `ImagePlaces`."""

    NO_SPLIT = auto()  # its image exists, but no split names it
    REPEATED = auto()  # has the labels of the entry that is used for an image, by another of its names
    LISTED = auto()  # named by a row of this split's lists, which already counts as the lost image
    THIS_SPLIT = auto()  # or of a later one as well
    EARLIER_SPLIT = auto()  # of this split or of an earlier one, in which it is counted
    OTHER_SPLIT = auto()  # not of this split; also if the entry is repeated there
    ELSEWHERE = auto()  # in a missing folder, or perhaps an image of no split


class UnmatchedEntry(NamedTuple):
    """An entry that belongs to no image of any split."""

    entry: ImageEntry
    reason: UnmatchedReason
    needs_folders: bool  # whether folders in its file name would tell which image it is of
    text: str  # the reason in a message, after the file name; empty for `UnmatchedReason.NO_SPLIT`


class Conflict(NamedTuple):
    """Entries of which one is probably that of an image of the split, but none is used."""

    image: int  # position in ``LabelRequest.images``
    entries: list[ImageEntry]  # that agree equally well
    num_labeled: int  # annotations of all entries that match the image
    is_of_earlier: bool  # whether an earlier split has the image as well


class MatchedEntries(NamedTuple):
    """The entries of a label file, matched with images."""

    entry_of: dict[int, ImageEntry]  # entries of the split's images, by position in ``LabelRequest.images``
    in_other_folders: list[int]  # those of these images whose entry is in another folder
    conflicts: list[Conflict]
    unmatched: list[UnmatchedEntry]  # entries of no split's images
    are_of_earlier: bool  # whether an earlier split has images in the file


@dataclass(slots=True, eq=False, kw_only=True)
class _InexactEntry:
    """An entry whose file name is not used literally, and all that the file name tells."""

    entry: ImageEntry
    matches: tuple[ImageNumber, ...]  # images that it matches by name
    image: KnownImage | None  # the only one of these: then the entry is a candidate for it
    agreement: int  # number of last folders that the file name has in common with ``image``
    num_own_folders: int  # folders of the file name besides those that all file names have in common
    names_split_folder: bool  # whether the folders in common tell the split of ``image``
    place: Place  # where its image would be, if no split has it
    is_in_other_folder: bool = False  # see `_mark_other_folders`

    @property
    def is_literal(self) -> bool:
        """Whether the file name is literally that of ``image``, which then has another entry."""
        names = self.image.names if self.image else ()
        return any(self.entry.normal_name in (file.name, file.name_in_split) for file in names)

    def may_be_of_another_image(self, conflicting_folders: Set[str]) -> bool:
        """Returns whether the folders let doubt that the entry is of ``image``. ``conflicting_folders``: see
        `_conflicting_folders`."""
        return self.is_in_other_folder or (not self.names_split_folder and self.entry.folder in conflicting_folders)


def match_entries(entries: Sequence[ImageEntry], request: LabelRequest) -> MatchedEntries:
    """Matches entries with images by the rule above."""
    images = _images_of_splits(request)
    position_of = _match_literally(entries, images)
    literal = set(position_of.values())
    entry_of = {image: entries[position] for image, position in position_of.items()}

    reader = _NameReader(images, request.others, entries)
    inexact_entries = [reader.read(entry) for position, entry in enumerate(entries) if position not in literal]
    _mark_other_folders(inexact_entries, [images[i] for i in entry_of])
    candidates = [inexact for inexact in inexact_entries if inexact.image]
    if _do_names_repeat(inexact_entries, entry_of, images):
        candidates = [candidate for candidate in candidates if not candidate.is_in_other_folder]

    used, conflicting = _choose(candidate for candidate in candidates if candidate.matches[0] not in entry_of)
    entry_of |= {i: candidate.entry for i, candidate in used.items()}
    used_or_conflicting = {*used.values(), *(rival for rivals in conflicting.values() for rival in rivals)}
    doubtful_folders = _conflicting_folders(conflicting.values())
    of_this = [i for i, image in enumerate(images) if SplitOrder.THIS in image.splits]
    return MatchedEntries(
        entry_of={i: entry_of[i] for i in of_this if i in entry_of},
        in_other_folders=[i for i in of_this if i in used and used[i].may_be_of_another_image(doubtful_folders)],
        conflicts=[_conflict(i, images[i], conflicting[i]) for i in of_this if i in conflicting],
        unmatched=[
            _unmatched(inexact, entry_of.get(inexact.matches[0]) if inexact.image else None, reader.names)
            for inexact in inexact_entries
            if inexact not in used_or_conflicting
        ],
        are_of_earlier=any(SplitOrder.EARLIER in images[i].splits for i in entry_of),
    )


class _NameReader:
    """Reads the file names of entries: which images they match, and where their image would be.

    Args:
        images: images of all splits with this label file.
        others: other places.
        entries: all entries of the label file.
    """

    def __init__(self, images: Sequence[KnownImage], others: OtherImages, entries: Sequence[ImageEntry]) -> None:
        self.names = ImageNames([file.name for file in image.names] for image in images)
        self._images = images
        self._outer_folders = common_folders(entry.file_name for entry in entries)
        self._places = ImagePlaces(images, others, self._outer_folders)
        self._num_telling = _num_telling_parts([*(image.split_folder for image in images), *others.missing_folders])

    def read(self, entry: ImageEntry) -> _InexactEntry:
        """Returns what the file name of ``entry`` tells."""
        matches = self.names.find(entry.file_name, self._outer_folders)
        image = self._images[matches[0]] if len(matches) == 1 else None
        agreement = self.names.agreement(entry.file_name, matches[0]) if image else 0
        num_own_folders = num_folders(entry.file_name) - len(self._outer_folders)
        return _InexactEntry(
            entry=entry,
            matches=matches,
            image=image,
            agreement=agreement,
            num_own_folders=num_own_folders,
            names_split_folder=image is not None and self._names_split_folder(image, agreement, num_own_folders),
            place=self._places.closest(entry.file_name, matches),
        )

    def _names_split_folder(self, image: KnownImage, agreement: int, num_own_folders: int) -> bool:
        """Returns whether ``agreement`` folders reach up to the part that tells the folder of the image's split from
        those of other splits, or at least into this folder if the file name has no more."""
        split_folder = image.split_folder
        num_subfolders = image.num_subfolders
        if not split_folder:  # the data set's folder, which has no name of its own
            return agreement >= max(num_subfolders, 1)
        num_needed = num_subfolders + self._num_telling[split_folder.rstrip("/")]
        return agreement > num_subfolders and agreement >= min(num_needed, num_own_folders)


def _num_telling_parts(folders: Iterable[str]) -> dict[str, int]:
    """Returns, by folder, the number of last parts that tell it from the other ``folders``: 2 for train/images next to
    val/images. If all its parts are the end of another one, this is all."""
    parts_of = {folder.rstrip("/"): loose(folder.rstrip("/")).split("/") for folder in dict.fromkeys(folders)}
    counts = Counter(
        tuple(parts[start:]) for parts in set(map(tuple, parts_of.values())) for start in range(len(parts))
    )
    num_telling = {}
    for folder, parts in parts_of.items():
        unique = (count for count in range(1, len(parts)) if counts[tuple(parts[-count:])] == 1)
        num_telling[folder] = next(unique, len(parts))
    return num_telling


def _images_of_splits(request: LabelRequest) -> list[KnownImage]:
    """Returns the images of all splits with this label file, by `ImageNumber`. The split's own images come first, at
    their positions in ``request.images``."""
    names_of_own = [(image, *request.aliases.get(image.name, ())) for image in request.images]
    splits = {
        SplitOrder.THIS: names_of_own,
        SplitOrder.EARLIER: request.others.earlier.images,
        SplitOrder.LATER: request.others.later.images,
    }
    files = {split: {file.name for names in of_split for file in names} for split, of_split in splits.items()}
    images: dict[str, KnownImage] = {}  # by usual name
    for split, of_split in splits.items():
        for names in of_split:
            name = names[0].name
            if split is SplitOrder.THIS or name not in files[SplitOrder.THIS]:
                having = frozenset(other for other, in_other in files.items() if name in in_other)
                images.setdefault(name, KnownImage(names, having))
    return list(images.values())


def _match_literally(entries: Sequence[ImageEntry], images: Sequence[KnownImage]) -> dict[ImageNumber, int]:
    """Returns, by image, the position of the entry whose file name is the image's name relative to the data set's
    folder or to its split's.

    Read in these two ways, a name may be that of two images, "train/0.jpg" and "val/train/0.jpg". It is read in the way
    in which more entries name an image, because a label file usually has one. If an image has several entries, the
    first one with annotations is preferred: without any, the image would be a background.
    """
    in_split = _with_unique_names(images, attrgetter("name_in_split"))
    in_root = _with_unique_names(images, attrgetter("name"))
    file_names = [entry.normal_name for entry in entries]
    is_in_root = sum(name in in_root for name in file_names) > sum(name in in_split for name in file_names)
    entry_of: dict[ImageNumber, int] = {}
    rest = list(range(len(entries)))
    for image_of_name in (in_root, in_split) if is_in_root else (in_split, in_root):
        named: dict[ImageNumber, int] = {}
        for number in rest:
            image = image_of_name.get(file_names[number])
            if image is None or image in entry_of:
                continue
            if image not in named or (entries[number].num_labeled and not entries[named[image]].num_labeled):
                named[image] = number
        entry_of |= named
        rest = [number for number in rest if file_names[number] not in image_of_name]
    return entry_of


def _with_unique_names(images: Sequence[KnownImage], name_of: Callable[[ImageFile], str]) -> dict[str, ImageNumber]:
    """Returns images by their names. Names that several images share are left out: in a list, or relative to folders
    of several splits."""
    images_of_name: dict[str, set[int]] = {}
    for i, image in enumerate(images):
        for file in image.names:
            images_of_name.setdefault(name_of(file), set()).add(i)
    return {name: min(numbers) for name, numbers in images_of_name.items() if len(numbers) == 1}


def _mark_other_folders(inexact_entries: Sequence[_InexactEntry], literal: Iterable[KnownImage]) -> None:
    """Marks the candidates whose folders contradict that of their image's split.

    They are in the folder of another split or in a missing one. Folders that the data set does not have may also be
    those of another machine, or from before a folder was renamed, unless other entries call the image's split as it is
    called. The data set's folder has no name that they could call. ``literal``: images that an entry names literally.
    """
    known_folders = {image.split_folder for image in literal}
    known_folders |= {
        inexact.image.split_folder for inexact in inexact_entries if inexact.image and inexact.names_split_folder
    }
    known_folders.discard("")
    for inexact in inexact_entries:
        if inexact.image is None:
            continue
        has_other_folder = not inexact.names_split_folder and inexact.num_own_folders > inexact.agreement
        is_unknown_folder = has_other_folder and inexact.image.split_folder in known_folders
        inexact.is_in_other_folder = is_unknown_folder or _is_of_another_split(inexact.place, inexact.image)


def _is_of_another_split(place: Place, image: KnownImage) -> bool:
    """Returns whether ``place`` is that of another split than those of ``image``, or a missing folder."""
    if place.kind is PlaceKind.SPLITS:
        return image.splits.isdisjoint(place.splits)
    return place.kind is PlaceKind.ELSEWHERE


def _do_names_repeat(
    inexact_entries: Sequence[_InexactEntry], literal: Mapping[ImageNumber, ImageEntry], images: Sequence[KnownImage]
) -> bool:
    """Returns whether the folders of candidates in other folders have the same names as the folders of the images that
    they match, as if each split were numbered from 0: then the entries are of missing images. Single repetitions do not
    count: images may have been copied before they were moved. ``literal``: entries with literal names, by their image.
    """
    other_folders = {inexact.entry.folder for inexact in inexact_entries if inexact.is_in_other_folder}
    if not other_folders:
        return False
    folders_of_name = _folders_of_names(inexact_entries, literal, images, other_folders)
    folders_of_names_there = [folders for folders in folders_of_name.values() if not other_folders.isdisjoint(folders)]
    num_repeated = sum(len(folders) > 1 for folders in folders_of_names_there)

    ambiguous = [inexact.entry for inexact in inexact_entries if not inexact.image]
    with_own_entry = {
        inexact.matches[0] for inexact in inexact_entries if inexact.image and not inexact.is_in_other_folder
    }
    num_ambiguous = _count_namesakes(
        [entry for entry in ambiguous if entry.folder in other_folders], images, with_own_entry.union(literal)
    )
    num_names = len(folders_of_names_there) + num_ambiguous
    return num_repeated + num_ambiguous > max(1, _MAX_REPEATED_SHARE * num_names)


def _folders_of_names(
    inexact_entries: Sequence[_InexactEntry],
    literal: Mapping[ImageNumber, ImageEntry],
    images: Sequence[KnownImage],
    other_folders: Set[str],
) -> dict[str, set[str]]:
    """Returns the folders of the entries of images by the names of these in their split, so that subfolders are told
    apart. Folders that have nothing to do with candidates in ``other_folders`` are left out: they may repeat names."""
    entries_with_image = [(entry, images[i]) for i, entry in literal.items()]
    entries_with_image += [(inexact.entry, inexact.image) for inexact in inexact_entries if inexact.image]
    split_folders = {
        inexact.image.split_folder for inexact in inexact_entries if inexact.image and inexact.is_in_other_folder
    }
    folders_of_name: dict[str, set[str]] = {}
    for entry, image in entries_with_image:
        if entry.folder in other_folders or image.split_folder in split_folders:
            folders_of_name.setdefault(image.names[0].name_in_split, set()).add(entry.folder)
    return folders_of_name


def _count_namesakes(entries: Iterable[ImageEntry], images: Sequence[KnownImage], with_entry: set[ImageNumber]) -> int:
    """Counts the ``entries`` with whose file name there are images, all of them ``with_entry``."""
    images_of_name: dict[str, set[ImageNumber]] = {}
    for i, image in enumerate(images):
        images_of_name.setdefault(_loose_file_name(image.names[0].name), set()).add(i)
    namesakes = [images_of_name.get(_loose_file_name(entry.normal_name)) for entry in entries]
    return sum(numbers <= with_entry for numbers in namesakes if numbers)


def _loose_file_name(path: str) -> str:
    return loose(path.rpartition("/")[2])


def _choose(
    candidates: Iterable[_InexactEntry],
) -> tuple[dict[ImageNumber, _InexactEntry], dict[ImageNumber, list[_InexactEntry]]]:
    """Returns, by image, the candidate that is used, and the candidates that are in conflict.

    If an image has several, those in other folders are left out unless all are. The one whose folders agree best is
    chosen, then one with annotations, then the one with the fewest folders: a file of several splits may name images of
    another split with the same file names in another folder. Candidates in other folders are no conflict, because they
    may all be of missing images.
    """
    candidates_of: dict[ImageNumber, list[_InexactEntry]] = {}
    for candidate in candidates:
        candidates_of.setdefault(candidate.matches[0], []).append(candidate)
    used = {}
    conflicting = {}
    for image, all_rivals in candidates_of.items():
        rivals = [candidate for candidate in all_rivals if not candidate.is_in_other_folder] or all_rivals
        best = rivals[0] if len(rivals) == 1 else max(rivals, key=_preference)
        if len(rivals) == 1 or not any(_is_as_likely(candidate, best) for candidate in rivals):
            used[image] = best
        elif not best.is_in_other_folder:
            conflicting[image] = rivals
    return used, conflicting


def _conflict(number: int, image: KnownImage, rivals: Sequence[_InexactEntry]) -> Conflict:
    """Returns the conflict of the entries that match an image. ``number``: its position among those of the split."""
    best = max(rivals, key=_preference)
    return Conflict(
        image=number,
        entries=[best.entry, *(rival.entry for rival in rivals if _is_as_likely(rival, best))],
        num_labeled=sum(rival.entry.num_labeled for rival in rivals),
        is_of_earlier=SplitOrder.EARLIER in image.splits,
    )


def _conflicting_folders(conflicts: Collection[Sequence[_InexactEntry]]) -> set[str]:
    """Returns the folders of entries in conflict, if several images have conflicts: then these folders probably have
    images of the same names, of which only some are here."""
    if len(conflicts) <= 1:
        return set()
    return {rival.entry.folder for rivals in conflicts for rival in rivals}


def _preference(candidate: _InexactEntry) -> tuple[int, bool, int]:
    """Returns how well a candidate fits its image, compared with others."""
    return candidate.agreement, candidate.entry.num_labeled > 0, -candidate.entry.file_name.count("/")


def _is_as_likely(candidate: _InexactEntry, best: _InexactEntry) -> bool:
    """Returns whether ``candidate`` fits their image as well as ``best``, but has other folders and other labels."""
    return (
        candidate is not best
        and not best.names_split_folder
        and _preference(candidate) == _preference(best)
        and loose(candidate.entry.folder) != loose(best.entry.folder)
        and not _have_same_labels(candidate.entry, best.entry)
    )


def _unmatched(inexact: _InexactEntry, used_entry: ImageEntry | None, names: ImageNames) -> UnmatchedEntry:
    """Returns an entry without an image, with the reason.

    Args:
        inexact: the entry.
        used_entry: the entry that is used for the image that it matches; None if there is none.
        names: names of all images.
    """
    reason = _reason(inexact, used_entry)
    is_of_no_split = reason is UnmatchedReason.NO_SPLIT
    text = "" if is_of_no_split else _reason_text(inexact, used_entry, names)
    if reason is UnmatchedReason.THIS_SPLIT and not inexact.place.has_its_folders and inexact.num_own_folders > 0:
        folder = os.path.dirname(inexact.entry.file_name)
        text += f"; if {folder} is a folder of another split, name it in the YAML"
    return UnmatchedEntry(
        entry=inexact.entry, reason=reason, needs_folders=_would_folders_tell(inexact) and not is_of_no_split, text=text
    )


def _would_folders_tell(inexact: _InexactEntry) -> bool:
    """Returns whether an entry matches several images, or without any folders one that another entry has."""
    if inexact.image is None:
        return len(inexact.matches) > 1
    return not inexact.is_literal and num_folders(inexact.entry.file_name) == 0


def _reason(inexact: _InexactEntry, used_entry: ImageEntry | None) -> UnmatchedReason:
    """Returns why an entry has no image. An image that may be of several splits is counted in the first of them."""
    place = inexact.place
    if used_entry is not None and inexact.is_literal and _have_same_labels(inexact.entry, used_entry):
        is_of_this = inexact.image is not None and SplitOrder.THIS in inexact.image.splits
        return UnmatchedReason.REPEATED if is_of_this else UnmatchedReason.OTHER_SPLIT
    if place.kind is PlaceKind.NO_SPLIT:
        return UnmatchedReason.NO_SPLIT
    if place.kind is PlaceKind.ELSEWHERE:
        return UnmatchedReason.ELSEWHERE
    if SplitOrder.THIS not in place.splits:
        return UnmatchedReason.OTHER_SPLIT
    if SplitOrder.EARLIER in place.splits:
        return UnmatchedReason.EARLIER_SPLIT
    return UnmatchedReason.LISTED if place.kind is PlaceKind.LISTED else UnmatchedReason.THIS_SPLIT


def _have_same_labels(first: ImageEntry, second: ImageEntry) -> bool:
    """Returns whether two entries have the same annotations, usable or not."""
    return _without_row_numbers(first.labels) == _without_row_numbers(second.labels)


def _without_row_numbers(labels: RawLabels) -> tuple[list[LabelRow], list[RowProblem]]:
    """Returns rows and problems, sorted, without the places where they are in the file."""
    column = ROW_NUMBER - 1  # the columns begin with the image, which a `LabelRow` lacks
    rows = sorted(row[:column] + row[column + 1 :] for row in labels.rows)
    return rows, sorted(problem._replace(row_number=-1) for problem in labels.problems)


def _reason_text(inexact: _InexactEntry, used_entry: ImageEntry | None, names: ImageNames) -> str:
    """Returns why an entry has no image, as text to follow its file name. ``names``: names of all images."""
    matches = inexact.matches
    if len(matches) > 1:
        return f"matches {len(matches)} images, such as {names.name(matches[0])} and {names.name(matches[1])}"
    if matches and used_entry is None:
        return f"is not among the split's images; {names.name(matches[0])} is in another folder"
    if matches:
        name = names.name(matches[0])
        is_same = name == inexact.entry.normal_name
        return f"{'' if is_same else f'matches {name}, which '}is already used by another entry"
    similar = names.same_stem(inexact.entry.file_name)
    hint = f", but {similar} is" if similar else ""
    return f"is not among the split's images{hint}"
