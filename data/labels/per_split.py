"""Reads labels of formats with one file per split (`LabelsPerSplit`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from data.labels.categories import Category
from data.labels.findings import CONFLICT, COUNTED_EARLIER, OTHER_FOLDER, STRAY, UNLISTED, Finding
from data.labels.image_entries import ImageEntry
from data.labels.label_format import LabelRequest
from data.labels.match_entries import Conflict, MatchedEntries, match_entries
from data.labels.rows import RawLabels
from data.labels.unmatched_entries import UnmatchedEntry
from data.split_files import ImageFile
from utils.errors import UserError, one_line
from utils.strings import counted, listed


class SplitFile(NamedTuple):
    """The content of a split's label file, with classes matched by name."""

    images: list[ImageEntry]
    categories: tuple[Category, ...]
    annotation_ids: Sequence[Any]  # by position
    strays: list[tuple[int, str]]  # positions of annotations without an image, and the reasons


class LabelsPerSplit:
    """A `LabelSource` that reads labels in pixels from one file per split. Images that it does not name are left out.

    Several splits may share the file, and it may name images of no split. Entries of other splits' images are not
    counted here; for entries that no image gets, see `data.labels.unmatched_entries`. Annotations without an entry,
    which may belong to any split, are lost in the first one.
    """

    normalized = False

    def __init__(self, request: LabelRequest, file: SplitFile) -> None:
        """Matches images by ``file_name`` relative to the data set's folder or the split's, or else with `ImageNames`.
        Raises UserError if the file names none of the split's images."""
        self._name = request.files[0].name
        self._annotation_ids = file.annotation_ids
        self.categories = file.categories
        matched = match_entries(file.images, request)
        if not matched.entry_of:
            raise self._nothing_fits(request.images, file.images, matched)
        positions = sorted(matched.entry_of)
        self.images = [request.images[i] for i in positions]
        self._entries = [matched.entry_of[i] for i in positions]
        self.image_ids: list[int | str] = [entry.image_id for entry in self._entries]
        self.findings = [
            *self._stray_annotations(file.strays, matched),
            *self._absent_images(matched.unmatched),
            *self._conflicts(request.images, matched.conflicts),
            *self._unlisted_images(request.images, matched),
            *self._images_with_other_folders(request.images, matched),
        ]

    def read(self, i: int) -> RawLabels | None:
        return self._entries[i].labels

    def where(self, i: int, row_number: int | None = None) -> str:
        return f"{self._name}: image {self.image_ids[i]}" if row_number is None else self._annotation(row_number)

    def _image(self, entry: ImageEntry) -> str:
        return f"{self._name}: image {entry.image_id}"

    def _annotation(self, position: int) -> str:
        return f"{self._name}: annotation {self._annotation_ids[position]}"

    def _stray_annotations(self, strays: Sequence[tuple[int, str]], matched: MatchedEntries) -> list[Finding]:
        """Returns findings about annotations without an image, which are lost in the first split with this file."""
        return [
            Finding(
                where=self._annotation(position),
                kind=STRAY,
                text=reason,
                lost_objects=0 if matched.are_of_earlier else 1,
                consequence=COUNTED_EARLIER if matched.are_of_earlier else "",
            )
            for position, reason in strays
        ]

    def _absent_images(self, unmatched: Sequence[UnmatchedEntry]) -> list[Finding]:
        """Returns findings about annotated entries without an image."""
        findings = []
        for absent in unmatched:
            entry = absent.entry
            if not absent.loss.kind or not entry.num_labeled:
                continue
            findings.append(
                Finding(
                    where=self._image(entry),
                    kind=absent.loss.kind,
                    text=f"{entry.file_name.strip() or 'the empty name'} {absent.reason}",
                    lost_images=int(absent.loss.image),
                    lost_objects=entry.num_labeled if absent.loss.objects else 0,
                    consequence=absent.loss.consequence,
                )
            )
        return findings

    def _conflicts(self, images: Sequence[ImageFile], conflicts: Sequence[Conflict]) -> list[Finding]:
        """Returns findings about images that are left out because several entries may be theirs."""
        return [
            Finding(
                where=self._image(conflict.entries[0]),
                kind=CONFLICT,
                text=_conflict_text(conflict, images),
                lost_images=0 if conflict.is_of_earlier else 1,
                lost_objects=0 if conflict.is_of_earlier else conflict.num_labeled,
                consequence=COUNTED_EARLIER if conflict.is_of_earlier else "left out",
            )
            for conflict in conflicts
        ]

    def _unlisted_images(self, images: Sequence[ImageFile], matched: MatchedEntries) -> list[Finding]:
        """Returns findings about images of the split that the file does not name."""
        named = {*matched.entry_of, *(conflict.image for conflict in matched.conflicts)}
        return [
            Finding(image.name, UNLISTED, f"{self._name} doesn't name it", consequence="left out")
            for i, image in enumerate(images)
            if i not in named
        ]

    def _images_with_other_folders(self, images: Sequence[ImageFile], matched: MatchedEntries) -> list[Finding]:
        """Returns findings about entries that name their image in another folder. Unless the images were moved, they
        may be of missing images of the same name."""
        return [
            Finding(
                where=self._image(matched.entry_of[i]),
                kind=OTHER_FOLDER,
                text=f"{matched.entry_of[i].file_name} matches {images[i].name}, which is in another folder",
            )
            for i in matched.in_other_folders
        ]

    def _nothing_fits(
        self, images: Sequence[ImageFile], entries: Sequence[ImageEntry], matched: MatchedEntries
    ) -> UserError:
        """Returns the error about a file of which no entry is used for an image of the split."""
        if matched.conflicts:
            conflict = matched.conflicts[0]
            message = _conflict_text(conflict, images)
            return UserError(f"{self._image(conflict.entries[0])}: {message}; delete the wrong entries")
        without_folders = [unmatched for unmatched in matched.unmatched if unmatched.needs_folders]
        if without_folders:
            shown = next((each for each in without_folders if each.num_matches > 1), without_folders[0])
            advice = "write file names with their folders in the data set"
            if shown.num_matches == 0:  # perhaps the file is of another split
                advice = f"check 'annotations' against the split's folder, or {advice}"
            file_name = one_line(shown.entry.file_name)[:200]
            return UserError(f"{self._image(shown.entry)}: {file_name} {shown.reason}; {advice}")
        first = f" (first: {one_line(entries[0].file_name)[:200]})" if entries else ""
        return UserError(
            f"{self._name}: names {counted(len(entries), 'image')}{first}, none of which is among the split's "
            f"{len(images)} (first: {images[0].name_in_split}); check 'annotations' against the split's folder"
        )


def _conflict_text(conflict: Conflict, images: Sequence[ImageFile]) -> str:
    file_names = dict.fromkeys(one_line(entry.file_name)[:200] for entry in conflict.entries)
    image = images[conflict.image].name
    return f"{listed(list(file_names), 3)} match {image} equally well, so it is unknown which is right"
