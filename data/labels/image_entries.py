"""Matches the image entries of a label file, which several splits may share, with the images of a split."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, NewType

from data.labels.image_names import ImageNames
from data.labels.label_format import LabelRequest
from data.labels.rows import ROW_NUMBER, LabelRow, RawLabels
from data.split_files import ImageFile, NamesOfImage

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


class UnmatchedEntry(NamedTuple):
    """An entry that belongs to no image."""

    entry: ImageEntry
    reason: str
    has_name: bool  # whether an image has the same file name
    is_repeated: bool = False  # whether another entry of the image has the same labels


class Origin(Enum):
    """The split that an image in a label file belongs to."""

    THIS_SPLIT = auto()
    EARLIER_SPLIT = auto()
    LATER_SPLIT = auto()
    NO_SPLIT = auto()


_OTHER_ORIGINS = (Origin.EARLIER_SPLIT, Origin.LATER_SPLIT, Origin.NO_SPLIT)


class NamedOrigin(NamedTuple):
    """An image that a label file may name, and the split it belongs to."""

    names: NamesOfImage
    origin: Origin


class MatchedEntries(NamedTuple):
    """The entries of a label file, matched with images."""

    entry_of: dict[int, ImageEntry]  # entries of the split's images, by position in ``LabelRequest.images``
    of_other_images: dict[Origin, list[ImageEntry]]  # entries of images of another split or of none
    unmatched: list[UnmatchedEntry]


def match_entries(entries: Sequence[ImageEntry], request: LabelRequest) -> MatchedEntries:
    """Matches entries with images: first entries whose file name is an image's name in the split, then all others by
    name."""
    candidates = _images_of_splits(request)
    images = [candidate.names for candidate in candidates]
    names = ImageNames([file.name for file in image] for image in images)

    entry_of = _match_names_in_split(entries, images)
    exact = set(entry_of.values())
    fits_of = {
        EntryNumber(number): [ImageNumber(i) for i in names.find(entry.file_name)]
        for number, entry in enumerate(entries)
        if number not in exact
    }
    entry_of |= _match_names(entries, fits_of, entry_of, names)

    matched = MatchedEntries(entry_of={}, of_other_images={origin: [] for origin in _OTHER_ORIGINS}, unmatched=[])
    for image_number, number in entry_of.items():
        origin = candidates[image_number].origin
        if origin is Origin.THIS_SPLIT:
            matched.entry_of[image_number] = entries[number]
        else:
            matched.of_other_images[origin].append(entries[number])

    with_image = set(entry_of.values())
    images_of_no_split = ImageNames.of_single_names(request.others.unassigned)
    for number, fits in fits_of.items():
        if number in with_image:
            continue
        if _is_of_no_split(entries[number], images_of_no_split, has_name=bool(fits)):
            matched.of_other_images[Origin.NO_SPLIT].append(entries[number])
        else:
            unmatched = _unmatched(entries[number], [images[i][0] for i in fits], names)
            if len(fits) == 1 and _is_repeated(entries[number], entries[entry_of[fits[0]]], images[fits[0]]):
                unmatched = unmatched._replace(is_repeated=True)
            matched.unmatched.append(unmatched)
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
    entries: Sequence[ImageEntry], images: Sequence[NamesOfImage]
) -> dict[ImageNumber, EntryNumber]:
    """Returns, by image, the entry whose file name is a name of the image in the split.

    If an image has several entries, the first one with annotations is preferred: without any, the image would be a
    background.
    """
    images_of_name: dict[str, set[int]] = {}  # images of several folders, or of a list, may share one
    for i, names in enumerate(images):
        for file in names:
            images_of_name.setdefault(file.name_in_split, set()).add(i)
    image_of_name = {name: ImageNumber(min(numbers)) for name, numbers in images_of_name.items() if len(numbers) == 1}
    entry_of: dict[ImageNumber, EntryNumber] = {}
    for number, entry in enumerate(entries):
        image = image_of_name.get(os.path.normpath(entry.file_name))
        if image is None:
            continue
        if image not in entry_of or (entry.num_labeled and not entries[entry_of[image]].num_labeled):
            entry_of[image] = EntryNumber(number)
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


def _unmatched(entry: ImageEntry, fits: Sequence[ImageFile], names: ImageNames) -> UnmatchedEntry:
    """Returns an entry with the reason why it has no image. ``fits``: the images that it matches by name."""
    if len(fits) > 1:
        reason = f"fits {len(fits)} of the split's images, such as {fits[0].name} and {fits[1].name}"
    elif fits:
        reason = f"would be {fits[0].name}, which another entry names"
    else:
        reason = "is not among the split's images"
        other = names.same_stem(entry.file_name)
        if other:
            reason += f", but {other} is"
    return UnmatchedEntry(entry, reason, has_name=bool(fits))
