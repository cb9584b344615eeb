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
from data.split_files import NamesOfImage, OtherImages

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


class _EntryWithoutImage(NamedTuple):
    """An entry that is used for no image of any split."""

    entry: ImageEntry
    fits: list[NamedOrigin]  # images that it matches by name
    used_entry: ImageEntry | None  # the entry that is used for the only image in ``fits``, if it is one

    @property
    def has_name(self) -> bool:
        """Whether an image has the same file name."""
        return bool(self.fits)


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
    rest = [
        _EntryWithoutImage(
            entry=entries[number],
            fits=[images[i] for i in fits],
            used_entry=entries[entry_of[fits[0]]] if len(fits) == 1 else None,
        )
        for number, fits in fits_of.items()
        if number not in with_image
    ]
    for without_image, reason in zip(rest, _reasons(rest, images, request.others)):
        text = "" if reason is NoImage.NO_SPLIT else _reason_text(without_image, names)
        matched.unmatched.append(UnmatchedEntry(without_image.entry, reason, without_image.has_name, text))
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


def _reasons(rest: Sequence[_EntryWithoutImage], images: Sequence[NamedOrigin], others: OtherImages) -> list[NoImage]:
    """Returns why each of the entries ``rest`` has no image. ``images``: images of all splits."""
    if not rest:
        return []
    of_no_split = ImageNames.of_single_names(others.unassigned)
    missing_here = ImageNames.of_single_names(others.missing)
    missing_elsewhere = ImageNames.of_single_names(others.missing_elsewhere)
    folders = _folders_of_splits(images)
    reason_of: dict[int, NoImage] = {}  # by position in ``rest``
    undecided: dict[int, _EntryWithoutImage] = {}
    for i, without_image in enumerate(rest):
        file_name = without_image.entry.file_name
        has_name = without_image.has_name
        if _is_of_no_split(file_name, of_no_split, has_name=has_name):
            reason_of[i] = NoImage.NO_SPLIT
        elif _is_repeated(without_image):
            is_here = without_image.fits[0].origin is Origin.THIS_SPLIT
            reason_of[i] = NoImage.REPEATED if is_here else NoImage.ELSEWHERE
        elif missing_here.find(file_name):
            reason_of[i] = NoImage.LISTED
        elif missing_elsewhere.find(file_name):
            reason_of[i] = NoImage.ELSEWHERE
        elif others.without_images and folders.may_lack(file_name, others.without_images, has_name=has_name):
            reason_of[i] = NoImage.MISSING_FOLDER
        else:
            undecided[i] = without_image
    reason_of |= _divided(undecided, folders)
    return [reason_of[i] for i in range(len(rest))]


def _is_of_no_split(file_name: str, images_of_no_split: ImageNames, *, has_name: bool) -> bool:
    """Returns whether an entry belongs to an image of no split. If an image of a split also has its file name
    (``has_name``), the folders must agree with those of the image of no split."""
    fits = images_of_no_split.find(file_name)
    if has_name:
        return any(images_of_no_split.agreement(file_name, image) for image in fits)
    return bool(fits)


def _is_repeated(without_image: _EntryWithoutImage) -> bool:
    """Returns whether an entry has the labels of the one that is used for an image, under another name of the image."""
    used_entry = without_image.used_entry
    if used_entry is None:
        return False
    file_name = os.path.normpath(without_image.entry.file_name)
    is_of_image = any(file_name in (file.name, file.name_in_split) for file in without_image.fits[0].names)
    return is_of_image and _have_same_labels(without_image.entry, used_entry)


def _have_same_labels(first: ImageEntry, second: ImageEntry) -> bool:
    """Returns whether two entries have the same boxes, and nothing else."""
    if first.labels.problems or second.labels.problems:
        return False
    return _without_row_numbers(first.labels.rows) == _without_row_numbers(second.labels.rows)


def _without_row_numbers(rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Returns rows, sorted, without the places where they are in the file."""
    column = ROW_NUMBER - 1  # the columns begin with the image, which a `LabelRow` lacks
    return sorted(row[:column] + row[column + 1 :] for row in rows)


def _folders_of_splits(images: Sequence[NamedOrigin]) -> ImageFolders:
    names_of: dict[Origin, list[str]] = {origin: [] for origin in Origin}
    for image in images:
        names_of[image.origin] += [file.name for file in image.names]
    return ImageFolders(names_of[Origin.EARLIER_SPLIT], names_of[Origin.THIS_SPLIT], names_of[Origin.LATER_SPLIT])


def _divided(undecided: Mapping[int, _EntryWithoutImage], folders: ImageFolders) -> dict[int, NoImage]:
    """Returns whether nonexistent images would belong to this split or to another, by the keys of ``undecided``.

    An image belongs to the splits whose image folders agree best with its own, and among these, to the splits with an
    image that its entry matches by name. Images that may belong to several splits are divided among them.
    """
    members_of: dict[frozenset[str], list[int]] = {}  # keys, by the folders that agree best
    for key, without_image in undecided.items():
        closest = folders.closest(without_image.entry.file_name)
        of_fits = {folder_of(file.name) for image in without_image.fits for file in image.names}
        members_of.setdefault(closest & of_fits or closest, []).append(key)
    reason_of: dict[int, NoImage] = {}
    for closest, members in members_of.items():
        sizes = folders.sizes(closest)
        lost_here = sizes.share_of(len(members))
        for position, key in enumerate(members):
            if not sizes.this:
                reason_of[key] = NoImage.ELSEWHERE
            elif not sizes.earlier and not sizes.later:
                reason_of[key] = NoImage.HERE
            else:
                reason_of[key] = NoImage.SHARED if position in lost_here else NoImage.SHARED_ELSEWHERE
    return reason_of


def _reason_text(without_image: _EntryWithoutImage, names: ImageNames) -> str:
    """Returns why an entry has no image, as text to follow its file name. ``names``: names of all images."""
    fits = [image.names[0].name for image in without_image.fits]
    if len(fits) > 1:
        return f"fits {len(fits)} of the split's images, such as {fits[0]} and {fits[1]}"
    if fits:
        return f"would be {fits[0]}, which another entry names"
    other = names.same_stem(without_image.entry.file_name)
    hint = f", but {other} is" if other else ""
    return f"is not among the split's images{hint}"
