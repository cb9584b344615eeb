"""Reads the labels of formats with one file for all images (`LabelsPerSplit`). Several splits may share the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from data.labels.categories import Category
from data.labels.findings import NO_LABEL, ORPHAN, UNDECLARED, Finding
from data.labels.label_format import LabelRequest, RawLabels
from data.labels.match import AMBIGUOUS, match_entries, name_parts
from utils.errors import UserError, one_line
from utils.files.paths import path_of
from utils.strings import counted


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
    strays: list[Finding] = field(default_factory=list)  # annotations without an entry


class LabelsPerSplit:
    """A `LabelSource` that reads the labels of a split's images, in pixels, from one file. Images that it does not name
    are left out."""

    normalized = False

    def __init__(self, request: LabelRequest, file: SplitFile) -> None:
        """Matches entries with the images of all splits that name the file, so that each split gets the same answer.
        Raises UserError if no entry is of an image of this split."""
        self._file = file
        self.categories = file.categories
        images = list(dict.fromkeys(request.json_images or request.images))
        image_of_entry = match_entries([_below(entry.file_name, request.root) for entry in file.entries], images)
        entry_of: dict[str, ImageEntry] = {}
        unused: list[tuple[ImageEntry, str]] = []  # with the reason
        not_found: list[ImageEntry] = []
        # Entries with annotations first: without any, an image would be a background.
        order = sorted(range(len(file.entries)), key=lambda i: not file.entries[i].labels.num_labeled)
        for number in order:
            entry = file.entries[number]
            image = int(image_of_entry[number])
            if image == AMBIGUOUS:
                unused.append((entry, "fits several images"))
            elif image < 0:
                not_found.append(entry)
            elif images[image] in entry_of:
                unused.append((entry, f"fits {images[image]}, which has another entry"))
            else:
                entry_of[images[image]] = entry
        self.images = [name for name in request.images if name in entry_of]
        if not self.images:
            raise UserError(
                f"{file.name}: none of its {counted(len(file.entries), 'entry')}"
                f"{_first([entry.file_name for entry in file.entries])} fits one of the split's "
                f"{counted(len(request.images), 'image')} (first: {request.images[0]}); check 'annotations' and the "
                "file names"
            )
        self._entries = [entry_of[name] for name in self.images]
        self.image_ids: list[int | str] | None = [entry.image_id for entry in self._entries]
        undeclared = not_found
        if not request.has_missing_split:
            if request.json_undeclared is None:
                existing = _existing_images(entry_of, not_found, request.root)
            else:
                existing = set(request.json_undeclared)
            undeclared = [entry for entry in not_found if entry.file_name in existing]
            lost = [entry for entry in not_found if entry.file_name not in existing]
            unused += [(entry, "is the file name of no image") for entry in lost]
        self.undeclared_images = [entry.file_name for entry in undeclared]
        self.findings = [
            *file.strays,
            *(self._orphan(entry, reason) for entry, reason in unused if entry.labels.num_labeled),
            *self._undeclared(undeclared),
            *(
                Finding(name, NO_LABEL, f"not in {file.name}, left out")
                for name in request.images
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

    def _orphan(self, entry: ImageEntry, reason: str) -> Finding:
        where = f"{self._file.name}: image {entry.image_id}"
        text = f"{one_line(entry.file_name)[:200]} {reason}"
        return Finding(where, ORPHAN, text, lost_images=1, lost_objects=entry.labels.num_labeled)

    def _undeclared(self, entries: Sequence[ImageEntry]) -> list[Finding]:
        """Returns one finding about all ``entries`` with annotations."""
        labeled = [entry for entry in entries if entry.labels.num_labeled]
        if not labeled:
            return []
        num_objects = sum(entry.labels.num_labeled for entry in labeled)
        count = f"{counted(len(labeled), 'entry')} with {counted(num_objects, 'object')}"
        return [Finding(self._file.name, UNDECLARED, f"{count}{_first([entry.file_name for entry in labeled])}")]


def _below(file_name: str, root: Path) -> str:
    """Returns an absolute path in the data set's folder relative to it, and any other file name as it is."""
    return file_name[len(str(root)) :] if file_name.startswith(f"{root}{os.sep}") else file_name


def _first(names: Sequence[str]) -> str:
    return f" (first: {one_line(names[0])[:200]})" if names else ""


def _existing_images(entry_of: dict[str, ImageEntry], entries: Sequence[ImageEntry], root: Path) -> set[str]:
    """Returns the file names of those of ``entries`` whose image exists without being declared: where the images with
    entries are, as ``images/train`` is the place of "7.png" in ``images/train/7.png``, or in the data set's folder.
    Each folder is read once."""
    places = {""}
    for image, entry in entry_of.items():
        parts = image.split("/")
        places.add("/".join(parts[: -len(name_parts(entry.file_name))]))
    files_of: dict[str, set[str]] = {}
    existing = set()
    for entry in entries:
        folder, _, name = "/".join(name_parts(unquote(entry.file_name))).rpartition("/")
        if folder not in files_of:
            files_of[folder] = set()
            for place in places:
                with contextlib.suppress(OSError, ValueError):  # no such folder
                    files_of[folder].update(os.listdir(path_of(os.path.join(place, folder), root)))
        if name in files_of[folder]:
            existing.add(entry.file_name)
    return existing
