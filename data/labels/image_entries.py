"""Matches the image entries of a label file, which several splits may share, with the images of a split.

Each entry without an image gets one reason (`UnmatchedReason`), from which `per_split` derives what is lost.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, NewType

from data.labels.image_names import ImageNames
from data.labels.image_places import ImagePlaces, NamedOrigin, Origin, PlaceKind
from data.labels.label_format import LabelRequest
from data.labels.rows import ROW_NUMBER, LabelRow, RawLabels

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


class UnmatchedReason(Enum):
    """Why an entry belongs to no image of any split. If its image does not exist, the reason names the place where it
    would be, see `ImagePlaces`."""

    NO_SPLIT = auto()  # its image exists, but no split names it
    REPEATED = auto()  # has the labels of the entry that is used for an image, by another of its names
    LISTED = auto()  # named by a row of this split's lists, which already counts as the lost image
    THIS_SPLIT = auto()
    SHARED = auto()  # in folders of several splits, and in this split's share of such entries
    SHARED_ELSEWHERE = auto()  # the same, but in the share of another split
    MISSING_FOLDER = auto()
    OTHER_SPLIT = auto()  # also if the entry is repeated there


class UnmatchedEntry(NamedTuple):
    """An entry that belongs to no image of any split."""

    entry: ImageEntry
    reason: UnmatchedReason
    has_name: bool  # whether an image has the same file name
    text: str  # the reason in a message, after the file name; empty for `UnmatchedReason.NO_SPLIT`


class MatchedEntries(NamedTuple):
    """The entries of a label file, matched with images."""

    entry_of: dict[int, ImageEntry]  # entries of the split's images, by position in ``LabelRequest.images``
    of_splits: dict[Origin, list[ImageEntry]]  # entries of all splits' images, by the first split that has the image
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

    matched = MatchedEntries({}, {origin: [] for origin in Origin}, [])
    for image, number in entry_of.items():
        if images[image].origin is Origin.THIS_SPLIT:
            matched.entry_of[image] = entries[number]
        matched.of_splits[images[image].first_origin].append(entries[number])

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
    for without_image, reason in zip(rest, _reasons(rest, ImagePlaces(images, request.others))):
        text = "" if reason is UnmatchedReason.NO_SPLIT else _reason_text(without_image, names)
        matched.unmatched.append(UnmatchedEntry(without_image.entry, reason, without_image.has_name, text))
    return matched


def _images_of_splits(request: LabelRequest) -> list[NamedOrigin]:
    """Returns the images of all splits with this label file, by `ImageNumber`. The split's own images come first, at
    their positions in ``request.images``."""
    names_of_own = [(image, *request.aliases.get(image.name, ())) for image in request.images]
    own = {file.name for names in names_of_own for file in names}
    earlier = {file.name for names in request.others.earlier.images for file in names}
    images = []
    for names in names_of_own:
        first = Origin.EARLIER_SPLIT if names[0].name in earlier else Origin.THIS_SPLIT
        images.append(NamedOrigin(names, Origin.THIS_SPLIT, first))
    for names in request.others.earlier.images:
        if names[0].name not in own:
            images.append(NamedOrigin(names, Origin.EARLIER_SPLIT, Origin.EARLIER_SPLIT))
    for names in request.others.later.images:
        if names[0].name not in own and names[0].name not in earlier:
            images.append(NamedOrigin(names, Origin.LATER_SPLIT, Origin.LATER_SPLIT))
    return images


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


def _reasons(rest: Sequence[_EntryWithoutImage], places: ImagePlaces) -> list[UnmatchedReason]:
    """Returns why each of the entries ``rest`` has no image. Entries whose image would be in folders of several splits
    are divided among these splits."""
    reason_of: dict[int, UnmatchedReason] = {}  # by position in ``rest``
    in_folders: dict[frozenset[str], list[int]] = {}  # positions in ``rest``, by the folders where the images would be
    for i, without_image in enumerate(rest):
        if _is_repeated(without_image):
            is_here = without_image.fits[0].origin is Origin.THIS_SPLIT
            reason_of[i] = UnmatchedReason.REPEATED if is_here else UnmatchedReason.OTHER_SPLIT
            continue
        place = places.closest(without_image.entry.file_name, without_image.fits)
        if place.kind is PlaceKind.SPLIT_FOLDERS:
            in_folders.setdefault(place.folders, []).append(i)
        elif place.kind is PlaceKind.NO_SPLIT:
            reason_of[i] = UnmatchedReason.NO_SPLIT
        elif place.kind is PlaceKind.MISSING_FOLDER:
            reason_of[i] = UnmatchedReason.MISSING_FOLDER
        else:
            is_here = place.origin is Origin.THIS_SPLIT
            reason_of[i] = UnmatchedReason.LISTED if is_here else UnmatchedReason.OTHER_SPLIT
    for folders, positions in in_folders.items():
        sizes = places.sizes(folders)
        lost_here = sizes.share_of(len(positions))
        for number, i in enumerate(positions):
            if not sizes.this:
                reason_of[i] = UnmatchedReason.OTHER_SPLIT
            elif not sizes.earlier and not sizes.later:
                reason_of[i] = UnmatchedReason.THIS_SPLIT
            else:
                reason_of[i] = UnmatchedReason.SHARED if number in lost_here else UnmatchedReason.SHARED_ELSEWHERE
    return [reason_of[i] for i in range(len(rest))]


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
