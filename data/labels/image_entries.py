"""Matches the image entries of a label file, which several splits may share, with the images of a split.

Each entry without an image gets one reason (`NoImage`), from which `per_split` derives what is lost.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, NewType

from data.labels.absent_images import ImageFolders, folder_of
from data.labels.image_names import ImageNames
from data.labels.label_format import LabelRequest
from data.labels.rows import ROW_NUMBER, LabelRow, RawLabels
from data.split_files import ImageFile, NamesOfImage, OtherImages

ImageNumber = NewType("ImageNumber", int)  # position among the images of all splits, see `_images_of_splits`
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


class NoImage(Enum):
    """Why an entry belongs to no image of any split."""

    NO_SPLIT = auto()  # its image exists, but no split names it
    REPEATED = auto()  # has the labels of the entry that is used for an image of this split, by another of its names
    LISTED = auto()  # its image does not exist, and a row of this split's lists already counts as the lost image
    HERE = auto()  # its image does not exist, and would belong to this split
    SHARED = auto()  # its image does not exist, may belong to several splits, and is in this split's share of these
    SHARED_ELSEWHERE = auto()  # the same, but in the share of another split
    MISSING_FOLDER = auto()  # its image does not exist, and may be in a missing folder of another split
    ELSEWHERE = auto()  # its image does not exist, and would belong to another split, or the entry is repeated there


class UnmatchedEntry(NamedTuple):
    """An entry that belongs to no image of any split."""

    entry: ImageEntry
    reason: NoImage
    has_name: bool  # whether an image has the same file name
    text: str  # the reason in a message, after the file name; empty for `NoImage.NO_SPLIT`


class Origin(Enum):
    """The split that an image in a label file belongs to."""

    THIS_SPLIT = auto()
    EARLIER_SPLIT = auto()
    LATER_SPLIT = auto()


class NamedOrigin(NamedTuple):
    """An image that a label file may name, and the split it belongs to."""

    names: NamesOfImage
    origin: Origin


class MatchedEntries(NamedTuple):
    """The entries of a label file, matched with images."""

    entry_of: dict[int, ImageEntry]  # entries of the split's images, by position in ``LabelRequest.images``
    of_earlier_splits: list[ImageEntry]  # entries of images of other splits
    of_later_splits: list[ImageEntry]
    unmatched: list[UnmatchedEntry]  # all other entries


def match_entries(entries: Sequence[ImageEntry], request: LabelRequest) -> MatchedEntries:
    """Matches entries with images: first entries whose file name is an image's name in the split, then all others by
    name."""
    images = _images_of_splits(request)
    names = ImageNames([file.name for file in image.names] for image in images)
    entry_of = _match_names_in_split(entries, images)
    exact = set(entry_of.values())
    fits_of = {
        EntryNumber(number): [ImageNumber(i) for i in names.find(entry.file_name)]
        for number, entry in enumerate(entries)
        if number not in exact
    }
    entry_of |= _match_names(entries, fits_of, entry_of, names)

    matched = MatchedEntries({}, [], [], [])
    for image, number in entry_of.items():
        if images[image].origin is Origin.THIS_SPLIT:
            matched.entry_of[image] = entries[number]
        elif images[image].origin is Origin.EARLIER_SPLIT:
            matched.of_earlier_splits.append(entries[number])
        else:
            matched.of_later_splits.append(entries[number])

    with_image = set(entry_of.values())
    fits_of_unmatched = {number: fits for number, fits in fits_of.items() if number not in with_image}
    reason_of = _reasons(entries, entry_of, fits_of_unmatched, images, request.others)
    for number, fits in fits_of_unmatched.items():
        reason = reason_of[number]
        text = ""
        if reason is not NoImage.NO_SPLIT:
            text = _reason_text(entries[number], [images[i].names[0] for i in fits], names)
        matched.unmatched.append(UnmatchedEntry(entries[number], reason, has_name=bool(fits), text=text))
    return matched


def _images_of_splits(request: LabelRequest) -> list[NamedOrigin]:
    """Returns the images of all splits with this label file, by `ImageNumber`. The split's own images come first, at
    their positions in ``request.images``."""
    aliases = request.aliases
    return [
        *(NamedOrigin((image, *aliases.get(image.name, ())), Origin.THIS_SPLIT) for image in request.images),
        *(NamedOrigin(names, Origin.EARLIER_SPLIT) for names in request.others.earlier_splits),
        *(NamedOrigin(names, Origin.LATER_SPLIT) for names in request.others.later_splits),
    ]


def _match_names_in_split(
    entries: Sequence[ImageEntry], images: Sequence[NamedOrigin]
) -> dict[ImageNumber, EntryNumber]:
    """Returns, by image, the entry whose file name is a name of the image in the split.

    If an image has several entries, the first one with annotations is preferred: without any, the image would be a
    background.
    """
    images_of_name: dict[str, set[int]] = {}  # images of several folders, or of a list, may share one
    for i, image in enumerate(images):
        for file in image.names:
            images_of_name.setdefault(file.name_in_split, set()).add(i)
    image_of_name = {name: ImageNumber(min(numbers)) for name, numbers in images_of_name.items() if len(numbers) == 1}
    entry_of: dict[ImageNumber, EntryNumber] = {}
    for number, entry in enumerate(entries):
        named = image_of_name.get(os.path.normpath(entry.file_name))
        if named is None:
            continue
        if named not in entry_of or (entry.num_labeled and not entries[entry_of[named]].num_labeled):
            entry_of[named] = EntryNumber(number)
    return entry_of


def _match_names(
    entries: Sequence[ImageEntry],
    fits_of: Mapping[EntryNumber, Sequence[ImageNumber]],
    matched: Container[ImageNumber],
    names: ImageNames,
) -> dict[ImageNumber, EntryNumber]:
    """Returns, by image, the entry that matches only this image.

    If an image has several entries, the one whose folders agree best is chosen, then one with annotations: a file of
    several splits may name images of another split with the same file names in another folder.

    Args:
        fits_of: the images that an entry matches by name.
        matched: images that already have an entry.
        names: names of all images.
    """
    rivals_of: dict[ImageNumber, list[EntryNumber]] = {}
    for number, fits in fits_of.items():
        if len(fits) == 1 and fits[0] not in matched:
            rivals_of.setdefault(fits[0], []).append(number)

    def rank(number: EntryNumber, image: ImageNumber) -> tuple[int, bool]:
        return names.agreement(entries[number].file_name, image), entries[number].num_labeled > 0

    entry_of = {}
    for image, rivals in rivals_of.items():
        entry_of[image] = rivals[0]
        if len(rivals) > 1:
            entry_of[image] = max(rivals, key=partial(rank, image=image))
    return entry_of


def _reasons(
    entries: Sequence[ImageEntry],
    entry_of: Mapping[ImageNumber, EntryNumber],
    fits_of: Mapping[EntryNumber, Sequence[ImageNumber]],
    images: Sequence[NamedOrigin],
    others: OtherImages,
) -> dict[EntryNumber, NoImage]:
    """Returns why entries belong to no image. ``fits_of``: the images that each of these entries matches by name."""
    if not fits_of:
        return {}
    of_no_split = ImageNames.of_single_names(others.unassigned)
    missing_here = ImageNames.of_single_names(others.missing)
    missing_elsewhere = ImageNames.of_single_names(others.missing_elsewhere)
    reason_of: dict[EntryNumber, NoImage] = {}
    undecided: dict[EntryNumber, ImageEntry] = {}
    folders = _folders_of_splits(images)
    for number, fits in fits_of.items():
        entry = entries[number]
        if _is_of_no_split(entry, of_no_split, has_name=bool(fits)):
            reason_of[number] = NoImage.NO_SPLIT
        elif len(fits) == 1 and _is_repeated(entry, entries[entry_of[fits[0]]], images[fits[0]].names):
            is_here = images[fits[0]].origin is Origin.THIS_SPLIT
            reason_of[number] = NoImage.REPEATED if is_here else NoImage.ELSEWHERE
        elif missing_here.find(entry.file_name):
            reason_of[number] = NoImage.LISTED
        elif missing_elsewhere.find(entry.file_name):
            reason_of[number] = NoImage.ELSEWHERE
        elif others.without_images and folders.may_lack(entry.file_name, others.without_images, has_name=bool(fits)):
            reason_of[number] = NoImage.MISSING_FOLDER
        else:
            undecided[number] = entry
    return reason_of | _divided(undecided, fits_of, images, folders)


def _folders_of_splits(images: Sequence[NamedOrigin]) -> ImageFolders:
    names_of: dict[Origin, list[str]] = {origin: [] for origin in Origin}
    for image in images:
        names_of[image.origin] += [file.name for file in image.names]
    return ImageFolders(names_of[Origin.EARLIER_SPLIT], names_of[Origin.THIS_SPLIT], names_of[Origin.LATER_SPLIT])


def _divided(
    entries: Mapping[EntryNumber, ImageEntry],
    fits_of: Mapping[EntryNumber, Sequence[ImageNumber]],
    images: Sequence[NamedOrigin],
    folders: ImageFolders,
) -> dict[EntryNumber, NoImage]:
    """Returns whether nonexistent images would belong to this split or to another.

    An image belongs to the splits whose image folders agree best with its own, and among these, to the splits with an
    image that its entry matches by name. Images that may belong to several splits are divided among them.
    """
    numbers_of: dict[frozenset[str], list[EntryNumber]] = {}  # by the folders that agree best
    for number, entry in entries.items():
        closest = folders.closest(entry.file_name)
        of_fits = {folder_of(file.name) for i in fits_of[number] for file in images[i].names}
        numbers_of.setdefault(closest & of_fits or closest, []).append(number)
    reason_of: dict[EntryNumber, NoImage] = {}
    for closest, numbers in numbers_of.items():
        sizes = folders.sizes(closest)
        lost_here = sizes.share_of(len(numbers))
        for position, number in enumerate(numbers):
            if not sizes.this:
                reason_of[number] = NoImage.ELSEWHERE
            elif not sizes.earlier and not sizes.later:
                reason_of[number] = NoImage.HERE
            else:
                reason_of[number] = NoImage.SHARED if position in lost_here else NoImage.SHARED_ELSEWHERE
    return reason_of


def _is_of_no_split(entry: ImageEntry, images_of_no_split: ImageNames, *, has_name: bool) -> bool:
    """Returns whether an entry belongs to an image of no split. If an image of a split also has its file name
    (``has_name``), the folders must agree with those of the image of no split."""
    fits = images_of_no_split.find(entry.file_name)
    if has_name:
        return any(images_of_no_split.agreement(entry.file_name, image) for image in fits)
    return bool(fits)


def _is_repeated(entry: ImageEntry, used_entry: ImageEntry, names: NamesOfImage) -> bool:
    """Returns whether an entry has the labels of the one that is used for an image, under another of its ``names``."""
    file_name = os.path.normpath(entry.file_name)
    is_of_image = any(file_name in (file.name, file.name_in_split) for file in names)
    return is_of_image and _have_same_labels(entry, used_entry)


def _have_same_labels(first: ImageEntry, second: ImageEntry) -> bool:
    """Returns whether two entries have the same boxes, and nothing else."""
    if first.labels.problems or second.labels.problems:
        return False
    return _without_row_numbers(first.labels.rows) == _without_row_numbers(second.labels.rows)


def _without_row_numbers(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Returns rows, sorted, without the places where they are in the file."""
    column = ROW_NUMBER - 1  # the columns begin with the image, which a `LabelRow` lacks
    return sorted(row[:column] + row[column + 1 :] for row in rows)


def _reason_text(entry: ImageEntry, fits: Sequence[ImageFile], names: ImageNames) -> str:
    """Returns why an entry has no image, as text to follow its file name. ``fits``: the images that it matches by
    name."""
    if len(fits) > 1:
        return f"fits {len(fits)} of the split's images, such as {fits[0].name} and {fits[1].name}"
    if fits:
        return f"would be {fits[0].name}, which another entry names"
    other = names.same_stem(entry.file_name)
    hint = f", but {other} is" if other else ""
    return f"is not among the split's images{hint}"
