"""Decides what a split loses with an entry that no image gets, and explains why no image gets it.

The image of such an entry usually does not exist: it is missing from the split where it would be (`ImagePlaces`). If
that may be several splits, it is counted in the first. For example, the splits are images/train and images/val, and
train has the image 0.png, with its own entry. This is lost with one more entry:

    file name            where its image would be                             lost
    images/train/0.png   it is 0.png, which has another entry                 an image of train, unless the labels are
                                                                              the same: then nothing, but reported
    train/9.png          in images/train                                      an image of train
    val/0.png            in images/val                                        an image of val
    9.png, test/9.png    in any split, as no folder is that of a split        an image of train, the first split
    images/old/9.png     there, if this image exists: it is of no split       nothing
    9.png                perhaps images/old/9.png, if this exists             nothing, but reported
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from data.labels.findings import ABSENT, COUNTED_EARLIER, IMAGE_ELSEWHERE, REPEATED_ENTRY
from data.labels.image_entries import Candidate, ImageEntry, ImageNumber, NameMatch
from data.labels.image_names import ImageNames, num_folders
from data.labels.image_places import PlaceKind
from data.labels.known_images import SplitOrder


class EntryLoss(NamedTuple):
    """What a split loses with an entry that no image gets, and how it is reported."""

    kind: str  # of the finding; "" if it is not reported
    image: bool = False
    objects: bool = False
    consequence: str = ""


_IMAGE_AND_OBJECTS = EntryLoss(ABSENT, image=True, objects=True)
_OBJECTS = EntryLoss(ABSENT, objects=True)  # a row of a list names the image, and counts as the lost image
_COUNTED_EARLIER = EntryLoss(ABSENT, consequence=COUNTED_EARLIER)
_REPEATED = EntryLoss(REPEATED_ENTRY)
_ELSEWHERE = EntryLoss(IMAGE_ELSEWHERE)
_NOT_OF_THIS_SPLIT = EntryLoss("")  # of a later split, or of an image that no split has


class UnmatchedEntry(NamedTuple):
    """An entry that no image of any split gets."""

    entry: ImageEntry
    loss: EntryLoss
    reason: str  # text of a message, after the file name
    num_matches: int  # images that it matches by name
    needs_folders: bool  # whether folders in its file name would tell which image it is of


def explain_unmatched(
    match: NameMatch, entry_of: Mapping[ImageNumber, ImageEntry], names: ImageNames
) -> UnmatchedEntry:
    """Returns what the split that is read loses with an entry, and why no image gets it.

    Args:
        match: the entry, and the images that it matches by name.
        entry_of: the entries that images get.
        names: names of all images.
    """
    used_entry = entry_of.get(match.number) if isinstance(match, Candidate) else None
    loss = _loss(match, used_entry)
    reason = _reason(match, used_entry, names)
    if loss is _IMAGE_AND_OBJECTS and not match.place.has_its_folders and match.num_own_folders > 0:
        folder = os.path.dirname(match.entry.file_name)
        reason += f"; if {folder} is a folder of another split, name it in the YAML"
    return UnmatchedEntry(match.entry, loss, reason, len(match.images), _needs_folders(match, names))


def _loss(match: NameMatch, used_entry: ImageEntry | None) -> EntryLoss:
    """Returns what the split that is read loses with an entry. ``used_entry``: the entry that is used for the only
    image that it matches."""
    if isinstance(match, Candidate) and match.is_literal and used_entry and match.entry.has_labels_of(used_entry):
        return _REPEATED if SplitOrder.THIS in match.image.splits else _NOT_OF_THIS_SPLIT
    kind, splits, _ = match.place
    if kind is PlaceKind.ELSEWHERE:
        return _ELSEWHERE
    if SplitOrder.THIS not in splits:
        return _NOT_OF_THIS_SPLIT
    if SplitOrder.EARLIER in splits:
        return _COUNTED_EARLIER
    return _OBJECTS if kind is PlaceKind.LISTED else _IMAGE_AND_OBJECTS


def _needs_folders(match: NameMatch, names: ImageNames) -> bool:
    """Returns whether an entry matches several images, or would if none of its folders is one of the data set, or
    matches, without any folders, an image that another entry has. ``names``: names of all images."""
    if match.place.kind is PlaceKind.NO_SPLIT:
        return False
    if isinstance(match, Candidate):
        return not match.is_literal and num_folders(match.entry.file_name) == 0
    if match.images or match.place.has_its_folders:
        return len(match.images) > 1
    return len(names.find(os.path.basename(match.entry.file_name))) > 1


def _reason(match: NameMatch, used_entry: ImageEntry | None, names: ImageNames) -> str:
    """Returns why no image gets an entry. For ``used_entry``, see `_loss`."""
    if not match.images:
        similar = names.same_stem(match.entry.file_name)
        hint = f", but {similar} is" if similar else ""
        return f"is not among the split's images{hint}"
    first = names.name(match.images[0])
    if len(match.images) > 1:
        return f"matches {len(match.images)} images, such as {first} and {names.name(match.images[1])}"
    if used_entry is None:
        return f"is not among the split's images; {first} is in another folder"
    matched = "" if first == match.entry.normal_name else f"matches {first}, which "
    return f"{matched}is already used by another entry"
