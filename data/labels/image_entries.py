"""Matches the image entries of a label file, which several splits may share, with the images of a split.

Each entry without an image gets one reason (`UnmatchedReason`), from which `per_split` derives what is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import NamedTuple, NewType, TypeAlias

from data.labels.image_names import ImageNames, common_folders
from data.labels.image_places import ImagePlaces, KnownImage, Place, PlaceKind, SplitOrder
from data.labels.label_format import LabelRequest
from data.labels.rows import ROW_NUMBER, LabelRow, RawLabels
from data.split_files import ImageFile

ImageNumber: TypeAlias = int  # position among the images of all splits, see `_images_of_splits`
_MAX_REPEATED_SHARE = 0.01  # of the names in other folders, see `_do_names_repeat`
EntryNumber = NewType("EntryNumber", int)  # position among the entries of the label file


class ImageEntry(NamedTuple):
    """An image in the label file of a split."""

    file_name: str  # with /
    image_id: int | str
    labels: RawLabels

    @property
    def num_labeled(self) -> int:
        """Number of annotations, usable or not."""
        return self.labels.num_labeled


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
    needs_folders: bool  # whether it matches images that another entry or several names: its folders would tell more
    text: str  # the reason in a message, after the file name; empty for `UnmatchedReason.NO_SPLIT`


class MatchedEntries(NamedTuple):
    """The entries of a label file, matched with images."""

    entry_of: dict[int, ImageEntry]  # entries of the split's images, by position in ``LabelRequest.images``
    in_other_folders: list[int]  # those of these images whose entry is in other folders, see `_in_other_folders`
    unmatched: list[UnmatchedEntry]  # entries of no split's images
    are_of_earlier: bool  # whether an earlier split has images in the file


class _EntryWithoutImage(NamedTuple):
    """An entry that is used for no image of any split."""

    entry: ImageEntry
    matches: tuple[ImageNumber, ...]  # images that it matches by name
    image: KnownImage | None  # the only one of these, if it is one
    used_entry: ImageEntry | None  # the entry that is used for ``image``, if there is one

    @property
    def is_literal(self) -> bool:
        """Whether the file name is literally that of ``image``."""
        file_name = os.path.normpath(self.entry.file_name)
        names = self.image.names if self.image else ()
        return any(file_name in (file.name, file.name_in_split) for file in names)


def match_entries(entries: Sequence[ImageEntry], request: LabelRequest) -> MatchedEntries:
    """Matches entries with images.

    1. An entry whose file name is literally that of an image, relative to the data set's folder or to its split's, is
       of this image.
    2. Any other entry that matches a single image (`ImageNames`) is of this image; of several entries, the one whose
       folders agree best. If none is that of the image's split (`_in_other_folders`), the image was moved, or the
       entry is of a missing image of the same name. All such entries are used, and reported, unless their folders have
       the same names as the folders of the images that they match (`_do_names_repeat`): then none of them is used.
    3. The place where its image would be (`ImagePlaces`) tells why an entry is used for no image.

    For example, images/train has 0.png and 1.png, and images/val has 2.png:

    - "images/train/0.png" is literally the name of the first image.
    - "D:/set/val/2.png" matches images/val/2.png by its file name and a folder.
    - "test/1.png" matches images/train/1.png by its file name only. As the first entry shows that images/train has the
      same name here, test is another folder.
    """
    images = _images_of_splits(request)
    names = ImageNames([file.name for file in image.names] for image in images)
    outer_folders = common_folders(entry.file_name for entry in entries)
    literal = _match_literally(entries, images)
    with_literal_name = set(literal.values())
    matches_of = {
        EntryNumber(number): names.find(entry.file_name, outer_folders)
        for number, entry in enumerate(entries)
        if number not in with_literal_name
    }
    places = ImagePlaces(images, request.others, outer_folders)
    in_other_folders = _in_other_folders(entries, matches_of, images, names, places, literal)
    plausible = matches_of
    if _do_names_repeat(entries, matches_of, images, literal, in_other_folders):
        plausible = {number: matches for number, matches in matches_of.items() if number not in in_other_folders}
    by_name = _match_by_name(entries, plausible, names, taken=literal)
    entry_of = literal | by_name

    with_image = set(entry_of.values())
    rest = [
        _EntryWithoutImage(
            entry=entries[number],
            matches=matches,
            image=images[matches[0]] if len(matches) == 1 else None,
            used_entry=entries[entry_of[matches[0]]] if len(matches) == 1 and matches[0] in entry_of else None,
        )
        for number, matches in matches_of.items()
        if number not in with_image
    ]
    of_this = {i: number for i, number in entry_of.items() if SplitOrder.THIS in images[i].splits}
    return MatchedEntries(
        entry_of={i: entries[number] for i, number in of_this.items()},
        in_other_folders=sorted(i for i, number in of_this.items() if number in in_other_folders),
        unmatched=[_unmatched(without_image, places, names) for without_image in rest],
        are_of_earlier=any(SplitOrder.EARLIER in images[i].splits for i in entry_of),
    )


def _unmatched(without_image: _EntryWithoutImage, places: ImagePlaces, names: ImageNames) -> UnmatchedEntry:
    """Returns an entry without an image, with the reason. ``names``: names of all images."""
    file_name = without_image.entry.file_name
    place = places.closest(file_name, without_image.matches)
    reason = _reason(without_image, place)
    is_of_no_split = reason is UnmatchedReason.NO_SPLIT
    text = "" if is_of_no_split else _reason_text(without_image, names)
    if reason is UnmatchedReason.THIS_SPLIT and not place.has_its_folders and places.has_own_folders(file_name):
        folder = os.path.dirname(file_name)
        text += f"; if {folder} is a folder of another split, name it in the YAML; if its images were moved, correct it"
    return UnmatchedEntry(
        entry=without_image.entry,
        reason=reason,
        needs_folders=bool(without_image.matches) and not without_image.is_literal and not is_of_no_split,
        text=text,
    )


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


def _match_literally(entries: Sequence[ImageEntry], images: Sequence[KnownImage]) -> dict[ImageNumber, EntryNumber]:
    """Returns, by image, the entry whose file name is the image's name relative to the data set's folder or to its
    split's.

    Read in these two ways, a name may be that of two images, "train/0.jpg" and "val/train/0.jpg". It is read in the way
    in which more entries name an image, because a label file usually has one. If an image has several entries, the
    first one with annotations is preferred: without any, the image would be a background.
    """
    in_split = _with_unique_names(images, attrgetter("name_in_split"))
    in_root = _with_unique_names(images, attrgetter("name"))
    file_names = [os.path.normpath(entry.file_name) for entry in entries]
    is_in_root = sum(name in in_root for name in file_names) > sum(name in in_split for name in file_names)
    entry_of: dict[ImageNumber, EntryNumber] = {}
    rest = list(map(EntryNumber, range(len(entries))))
    for image_of_name in (in_root, in_split) if is_in_root else (in_split, in_root):
        named: dict[ImageNumber, EntryNumber] = {}
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


def _in_other_folders(
    entries: Sequence[ImageEntry],
    matches_of: Mapping[EntryNumber, tuple[ImageNumber, ...]],
    images: Sequence[KnownImage],
    names: ImageNames,
    places: ImagePlaces,
    literal: Iterable[ImageNumber],
) -> set[EntryNumber]:
    """Returns the entries that match one image, but not by the folder of its split.

    They are in the folder of another split or in a missing one. Folders that the data set does not have may also be
    those of another machine, or from before a folder was renamed, unless other entries call the image's split as it is
    called.

    Args:
        literal: images that an entry names literally.
    """
    image_of = {number: matches[0] for number, matches in matches_of.items() if len(matches) == 1}
    agreements = {number: names.agreement(entries[number].file_name, image) for number, image in image_of.items()}
    with_split_folder = {n for n, image in image_of.items() if agreements[n] > _num_subfolders(images[image])}
    known_images = (*literal, *(image_of[number] for number in with_split_folder))
    known_folders = {_split_folder(images[image]) for image in known_images}
    in_other_folders = set()
    for number, image in image_of.items():
        file_name = entries[number].file_name
        has_other_folder = number not in with_split_folder and places.has_own_folders(file_name, agreements[number])
        is_unknown_folder = has_other_folder and _split_folder(images[image]) in known_folders
        if is_unknown_folder or _is_of_another_split(places.closest(file_name, matches_of[number]), images[image]):
            in_other_folders.add(number)
    return in_other_folders


def _do_names_repeat(
    entries: Sequence[ImageEntry],
    matches_of: Mapping[EntryNumber, tuple[ImageNumber, ...]],
    images: Sequence[KnownImage],
    literal: Mapping[ImageNumber, EntryNumber],
    in_other_folders: Set[EntryNumber],
) -> bool:
    """Returns whether the folders of entries in other folders have the same names as the folders of the images that
    they match, as if each split is numbered from 0: then the entries are of missing images. Single repetitions do not
    count: images may have been copied before they were moved.

    Names are compared below the folder of a split, so that subfolders are told apart. Folders that have nothing to do
    with entries in other folders may repeat names.
    """
    image_of = {number: image for image, number in literal.items()}
    image_of |= {number: matches[0] for number, matches in matches_of.items() if len(matches) == 1}
    folder_of = {number: os.path.dirname(os.path.normpath(entries[number].file_name)) for number in image_of}
    other_folders = {folder_of[number] for number in in_other_folders}
    split_folders = {_split_folder(images[image_of[number]]) for number in in_other_folders}
    folders_of_name: dict[str, set[str]] = {}
    for number, image in image_of.items():
        if folder_of[number] in other_folders or _split_folder(images[image]) in split_folders:
            name = images[image].names[0].name_in_split
            folders_of_name.setdefault(name, set()).add(folder_of[number])
    names_there = [name for name, folders in folders_of_name.items() if not other_folders.isdisjoint(folders)]
    num_repeated = sum(len(folders_of_name[name]) > 1 for name in names_there)
    return num_repeated > max(1, _MAX_REPEATED_SHARE * len(names_there))


def _num_subfolders(image: KnownImage) -> int:
    """Returns the number of folders between the folder of the split and the image."""
    return min(file.name_in_split.count("/") for file in image.names)


def _split_folder(image: KnownImage) -> str:
    """Returns the folder of the split that has an image; of a list, that of the image."""
    file = image.names[0]
    return file.name.removesuffix(file.name_in_split)


def _is_of_another_split(place: Place, image: KnownImage) -> bool:
    """Returns whether ``place`` is that of another split than those of ``image``, or a missing folder."""
    if place.kind is PlaceKind.SPLITS:
        return image.splits.isdisjoint(place.splits)
    return place.kind is PlaceKind.ELSEWHERE


def _match_by_name(
    entries: Sequence[ImageEntry],
    matches_of: Mapping[EntryNumber, tuple[ImageNumber, ...]],
    names: ImageNames,
    taken: Container[ImageNumber],
) -> dict[ImageNumber, EntryNumber]:
    """Returns, by image, the entry that matches only this image.

    If an image has several entries, the one whose folders agree best is chosen, then one with annotations, then the one
    with the fewest folders: a file of several splits may name images of another split with the same file names in
    another folder.

    Args:
        matches_of: the images that an entry matches by name.
        names: names of all images.
        taken: images that already have an entry.
    """
    rivals_of: dict[ImageNumber, list[EntryNumber]] = {}
    for number, matches in matches_of.items():
        if len(matches) == 1 and matches[0] not in taken:
            rivals_of.setdefault(matches[0], []).append(number)

    def rank(number: EntryNumber, image: ImageNumber) -> tuple[int, bool, int]:
        file_name = entries[number].file_name
        return names.agreement(file_name, image), entries[number].num_labeled > 0, -file_name.count("/")

    entry_of = {}
    for image, rivals in rivals_of.items():
        entry_of[image] = rivals[0]
        if len(rivals) > 1:
            entry_of[image] = max(rivals, key=partial(rank, image=image))
    return entry_of


def _reason(without_image: _EntryWithoutImage, place: Place) -> UnmatchedReason:
    """Returns why an entry has no image, which would be in ``place``. An image that may be of several splits is counted
    in the first of them."""
    if _is_repeated(without_image):
        is_of_this = without_image.image is not None and SplitOrder.THIS in without_image.image.splits
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


def _is_repeated(without_image: _EntryWithoutImage) -> bool:
    """Returns whether an entry has the labels of the one that is used for an image, under another name of the image."""
    used_entry = without_image.used_entry
    return used_entry is not None and without_image.is_literal and _have_same_labels(without_image.entry, used_entry)


def _have_same_labels(first: ImageEntry, second: ImageEntry) -> bool:
    """Returns whether two entries have the same boxes, and nothing else."""
    if first.labels.problems or second.labels.problems:
        return False
    return _without_row_numbers(first.labels.rows) == _without_row_numbers(second.labels.rows)


def _without_row_numbers(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Returns rows, sorted, without the places where they are in the file."""
    column = ROW_NUMBER - 1  # the columns begin with the image, which a `LabelRow` lacks
    return sorted(row[:column] + row[column + 1 :] for row in rows)


def _reason_text(without_image: _EntryWithoutImage, names: ImageNames) -> str:
    """Returns why an entry has no image, as text to follow its file name. ``names``: names of all images."""
    matches = without_image.matches
    if len(matches) > 1:
        return f"matches {len(matches)} images, such as {names.name(matches[0])} and {names.name(matches[1])}"
    if matches and without_image.used_entry is None:
        return f"is not among the split's images; {names.name(matches[0])} is in another folder"
    if matches:
        name = names.name(matches[0])
        is_same = name == os.path.normpath(without_image.entry.file_name)
        return f"{'' if is_same else f'matches {name}, which '}is already used by another entry"
    other = names.same_stem(without_image.entry.file_name)
    hint = f", but {other} is" if other else ""
    return f"is not among the split's images{hint}"
