"""Reads the labels of formats with one file for all images (`LabelsPerSplit`), which several splits may share.

Rule D5: an entry of the file fits the image whose path ends with its file name, in whole folders:

    images: train/a/7.png, val/a/7.png, val/8.png
    "8.png", "val/8.png", "VAL/8.PNG"   val/8.png
    "train/a/7.png"                     train/a/7.png
    "7.png", "a/7.png"                  ambiguous
    "test/8.png", "9.png"               not found

The name is compared as written, then percent-decoded (``x%20y.png``), then both again without regard to case and
Unicode composition. The first of these four that fits any image counts, if it fits only one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np

from data.labels.categories import Category
from data.labels.findings import NO_LABEL, ORPHAN, UNDECLARED, Finding
from data.labels.label_format import Listing, RawLabels
from utils.errors import UserError, one_line
from utils.files.paths import casefold_nfc
from utils.strings import counted

NOT_FOUND = -1
AMBIGUOUS = -2


def match_entries(file_names: Sequence[str], images: Sequence[str]) -> np.ndarray:
    """Returns the image of each of E file names, int64 (E,): its position in ``images``, `NOT_FOUND` or `AMBIGUOUS`.

    ``images``: paths with ``/``. In file names, ``\\`` is also a separator, and ``.`` and ``..`` are left out.
    """
    index = _SuffixIndex(images)
    return np.array([_match(name, index) for name in file_names], np.int64)


def _match(file_name: str, index: _SuffixIndex) -> int:
    names = [file_name]
    if "%" in file_name:
        names.append(unquote(file_name))
    for is_folded in (False, True):
        for name in names:
            image = index.find(name, is_folded=is_folded)
            if image != NOT_FOUND:
                return image
    return NOT_FOUND


def name_parts(file_name: str) -> list[str]:
    """Returns the folders and the name in a file name."""
    return [part for part in file_name.replace("\\", "/").split("/") if part not in ("", ".", "..")]


class _SuffixIndex:
    """Finds images by the last parts of their paths. For each number of parts, a table is made when it is needed."""

    def __init__(self, images: Sequence[str]) -> None:
        self._images = images
        self._tables: dict[tuple[int, bool], dict[str, int]] = {}

    def find(self, name: str, *, is_folded: bool) -> int:
        parts = name_parts(name)
        if not parts:
            return NOT_FOUND
        key = "/".join(parts)
        return self._table(len(parts), is_folded).get(casefold_nfc(key) if is_folded else key, NOT_FOUND)

    def _table(self, num_parts: int, is_folded: bool) -> dict[str, int]:
        if (num_parts, is_folded) not in self._tables:
            table: dict[str, int] = {}
            for number, image in enumerate(self._images):
                parts = image.rsplit("/", num_parts)
                if len(parts) < num_parts:
                    continue
                end = "/".join(parts[-num_parts:])
                if is_folded:
                    end = casefold_nfc(end)
                table[end] = AMBIGUOUS if end in table else number
            self._tables[num_parts, is_folded] = table
        return self._tables[num_parts, is_folded]


@dataclass(slots=True)
class ImageEntry:
    """An image in the label file."""

    file_name: str
    image_id: int | str
    labels: RawLabels


@dataclass(slots=True)
class SplitFile:
    """The content of a label file."""

    name: str  # relative to the data set's folder
    entries: list[ImageEntry]
    categories: tuple[Category, ...] = ()
    annotation_ids: Sequence[Any] = ()  # by row number; empty if row numbers locate the rows
    unmatched_annotations: list[Finding] = field(default_factory=list)  # annotations without an entry


class LabelsPerSplit:
    """A `LabelSource` that reads the labels of a split's images, in pixels, from one file. Images that it does not name
    are left out."""

    normalized = False

    def __init__(self, listing: Listing, file: SplitFile) -> None:
        """Matches entries with the images of all splits that name the file, so that each split gets the same answer.
        Raises UserError if no entry is of an image of this split."""
        self._file = file
        self.categories = file.categories
        images = listing.json_images or listing.images
        # Absolute paths in the data set's folder become relative to it.
        above = f"{listing.named_root}/"
        file_names = [entry.file_name.removeprefix(above) for entry in file.entries]
        image_of_entry = match_entries(file_names, images)
        entry_of: dict[str, ImageEntry] = {}
        orphans: list[Finding] = []
        not_found: list[int] = []
        # Entries with annotations first: without any, an image would be a background.
        order = sorted(range(len(file.entries)), key=lambda i: not file.entries[i].labels.num_labeled)
        for number in order:
            entry = file.entries[number]
            image = int(image_of_entry[number])
            if image == AMBIGUOUS:
                orphans += self._orphan(entry, "fits several images", lost_images=1)
            elif image == NOT_FOUND:
                not_found.append(number)
            elif images[image] in entry_of:
                orphans += self._orphan(entry, f"fits {images[image]}, which has another entry", lost_images=0)
            else:
                entry_of[images[image]] = entry
        self.images = [name for name in listing.images if name in entry_of]
        if not self.images:
            raise UserError(
                f"{file.name}: none of its {counted(len(file.entries), 'entry')}"
                f"{_first([entry.file_name for entry in file.entries])} fits one of the split's "
                f"{counted(len(listing.images), 'image')} (first: {listing.images[0]}); check 'annotations' and the "
                "file names"
            )
        self._entries = [entry_of[name] for name in self.images]
        self.image_ids: list[int | str] | None = [entry.image_id for entry in self._entries]
        undeclared = [file.entries[number] for number in not_found]
        if listing.other_images is not None:
            others = match_entries([file_names[number] for number in not_found], listing.other_images)
            for entry in itertools.compress(undeclared, others == NOT_FOUND):
                orphans += self._orphan(entry, "is the file name of no image", lost_images=1)
            for entry in itertools.compress(undeclared, others == AMBIGUOUS):
                orphans += self._orphan(entry, "fits several images of no split", lost_images=1)
            undeclared = list(itertools.compress(undeclared, others >= 0))
        self.findings = [
            *file.unmatched_annotations,
            *orphans,
            *self._undeclared(undeclared),
            *(
                Finding(NO_LABEL, f"not in {file.name}, left out", name)
                for name in listing.images
                if name not in entry_of
            ),
        ]

    def read(self, i: int) -> RawLabels | None:
        return self._entries[i].labels

    def where(self, i: int, row_number: int | None = None) -> str:
        if row_number is None:
            return f"{self._file.name}: image {self._entries[i].image_id}"
        if not self._file.annotation_ids:
            return f"{self._file.name}:{row_number}"
        return f"{self._file.name}: annotation {self._file.annotation_ids[row_number]}"

    def _orphan(self, entry: ImageEntry, reason: str, *, lost_images: int) -> list[Finding]:
        """Returns a finding about an entry that is not used, none if it has no annotation."""
        count = entry.labels.num_labeled
        if not count:
            return []
        where = f"{self._file.name}: image {entry.image_id}"
        text = f"{one_line(entry.file_name)[:200]} {reason}"
        return [Finding(ORPHAN, text, where, number=count, lost_images=lost_images, lost_objects=count)]

    def _undeclared(self, entries: Sequence[ImageEntry]) -> list[Finding]:
        """Returns one finding about all ``entries`` with annotations."""
        labeled = [entry for entry in entries if entry.labels.num_labeled]
        if not labeled:
            return []
        num_objects = sum(entry.labels.num_labeled for entry in labeled)
        count = f"{counted(len(labeled), 'entry')} with {counted(num_objects, 'object')}"
        text = f"{count}{_first([entry.file_name for entry in labeled])}"
        return [Finding(UNDECLARED, text, self._file.name, number=num_objects)]


def _first(names: Sequence[str]) -> str:
    return f" (first: {one_line(names[0])[:200]})" if names else ""
