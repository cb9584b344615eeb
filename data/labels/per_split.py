"""Matches the labels of formats with one file per split with the images, by name (`LabelsPerSplit`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from data.labels.clean import RawLabels
from data.labels.findings import ABSENT, STRAY, UNLISTED, Finding
from data.labels.image_names import ImageNames
from data.labels.label_format import ImageFile
from utils.errors import UserError, one_line
from utils.strings import counted


class ImageEntry(NamedTuple):
    """An image in the label file of a split. The lines of its labels are positions in the list of annotations."""

    file_name: str  # with /
    image_id: int | str
    labels: RawLabels


class SplitFile(NamedTuple):
    """The content of a label file of a split, with classes matched by name."""

    images: list[ImageEntry]
    category_ids: tuple[int, ...]  # by class; an unused id for a class that the file does not have
    annotation_ids: Sequence[Any]  # by position
    strays: list[tuple[int, str]]  # positions of annotations without an image, and the reason


class LabelsPerSplit:
    """Reads labels from one file per split, in pixels; a `LabelSource`. Images that it does not name are left out."""

    normalized = False

    def __init__(self, name: str, images: list[ImageFile], file: SplitFile) -> None:
        """Matches images by ``file_name`` in the split's folder, else as `ImageNames` does.

        Args:
            name: name of the label file, relative to the data set's folder.
            images: the split's images; and images of other splits or of none, without stamps, which the file may name.
            file: the content of the label file.

        Raises UserError if the file names none of the split's images.
        """
        self._name = name
        self.category_ids = file.category_ids
        self._annotation_ids = file.annotation_ids
        self.findings = [Finding(self._annotation(p), STRAY, text, lost_objects=1) for p, text in file.strays]
        elsewhere = ImageNames([image.name for image in images if not image.key])
        images = [image for image in images if image.key]
        entry_of, without_image = _match(file.images, images)
        for number, (reason, has_name) in without_image.items():
            entry = file.images[number]
            fits = elsewhere.find(entry.file_name)
            if has_name:  # an image of the split has this name: only the folder can show that another one is meant
                fits = [i for i in fits if elsewhere.agreement(entry.file_name, i)]
            if not fits:
                self.findings.append(self._absent(entry, f"{entry.file_name} {reason}"))
        split_images = [i for i, image in enumerate(images) if image.stamp is not None]
        listed = [i for i in split_images if i in entry_of]
        unlisted = [images[i].name for i in split_images if i not in entry_of]
        self.findings += [Finding(image, UNLISTED, f"left out: {name} doesn't name it") for image in unlisted]
        if not listed:
            for number, (reason, has_name) in without_image.items():
                if has_name:
                    entry = file.images[number]
                    text = f"{name}: image {entry.image_id}: {one_line(entry.file_name)[:200]} {reason}"
                    raise UserError(f"{text}; write file names with their folders")
            first = f" (first: {one_line(file.images[0].file_name)[:200]})" if file.images else ""
            raise UserError(
                f"{name}: names {counted(len(file.images), 'image')}{first}, none of which is among the split's "
                f"{len(split_images)} (first: {images[split_images[0]].key}); check 'annotations' against the split's "
                "folder"
            )
        self.images = [images[i] for i in listed]
        self._entries = [entry_of[i] for i in listed]
        self.image_ids: list[int | str] = [entry.image_id for entry in self._entries]

    def _absent(self, entry: ImageEntry, text: str) -> Finding:
        """Returns the finding about an image of the file that the split does not have."""
        objects = len(entry.labels.rows) + len(entry.labels.problems)
        where = f"{self._name}: image {entry.image_id}"
        return Finding(where, ABSENT, text, lost_images=int(objects > 0), lost_objects=objects)

    def read(self, i: int) -> RawLabels | None:
        return self._entries[i].labels

    def where(self, i: int, line: int | None = None) -> str:
        return f"{self._name}: image {self.image_ids[i]}" if line is None else self._annotation(line)

    def _annotation(self, position: int) -> str:
        return f"{self._name}: annotation {self._annotation_ids[position]}"


class _WithoutImage(NamedTuple):
    """An entry that belongs to no image of the split."""

    reason: str
    has_name: bool  # whether an image of the split has the same file name


def _match(
    entries: Sequence[ImageEntry], images: Sequence[ImageFile]
) -> tuple[dict[int, ImageEntry], dict[int, _WithoutImage]]:
    """Returns the entry of each image that has one, by the image's position; and all other entries by position."""
    key_counts = Counter(image.key for image in images)  # images of several folders, or of a list, may share one
    by_key = {image.key: i for i, image in enumerate(images) if key_counts[image.key] == 1}
    entry_of: dict[int, ImageEntry] = {}
    others: list[int] = []
    for number, entry in enumerate(entries):
        i = by_key.get(os.path.normpath(entry.file_name))
        if i is None or i in entry_of:
            others.append(number)
        else:
            entry_of[i] = entry
    names = ImageNames([image.name for image in images])
    fits = {number: names.find(entries[number].file_name) for number in others}
    claims: dict[int, list[int]] = {}
    for number, positions in fits.items():
        if len(positions) == 1 and positions[0] not in entry_of:
            claims.setdefault(positions[0], []).append(number)
    for i, numbers in claims.items():
        # A file of several splits may name images of another one that has the same file names in another folder.
        best = max(numbers, key=lambda n: names.agreement(entries[n].file_name, i)) if len(numbers) > 1 else numbers[0]
        entry_of[i] = entries[best]
    without_image: dict[int, _WithoutImage] = {}
    for number, positions in fits.items():
        if len(positions) > 1:
            shown = f"{images[positions[0]].name} and {images[positions[1]].name}"
            reason = f"fits {len(positions)} of the split's images, such as {shown}"
        elif not positions:
            other = names.same_stem(entries[number].file_name)
            reason = "is not among the split's images" + (f", but {other} is" if other else "")
        elif entry_of[positions[0]] is not entries[number]:
            reason = f"would be {images[positions[0]].name}, which another entry names"
        else:
            continue
        without_image[number] = _WithoutImage(reason, has_name=bool(positions))
    return entry_of, without_image
