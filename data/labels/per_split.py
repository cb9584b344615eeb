"""Matches the labels of formats with one file per split with the images, by name (`LabelsPerSplit`)."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Container, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from data.labels.findings import ABSENT, STRAY, UNLISTED, Finding
from data.labels.image_names import ImageNames, loose, readings_of
from data.labels.label_format import ImageFile, LabelRequest, OtherImages
from data.labels.rows import RawLabels
from utils.errors import UserError, one_line
from utils.strings import counted


class ImageEntry(NamedTuple):
    """An image in the label file of a split. The lines of its labels are positions in the list of annotations."""

    file_name: str  # with /
    image_id: int | str
    labels: RawLabels

    @property
    def num_labeled(self) -> int:
        """Counts its annotations, whether they can be used or not."""
        return self.labels.num_labeled


class SplitFile(NamedTuple):
    """The content of a label file of a split, with classes matched by name."""

    images: list[ImageEntry]
    category_ids: tuple[int, ...]  # by class; an unused id for a class that the file does not have
    annotation_ids: Sequence[Any]  # by position
    strays: list[tuple[int, str]]  # positions of annotations without an image, and the reason


class LabelsPerSplit:
    """Reads labels from one file per split, in pixels; a `LabelSource`. Images that it does not name are left out.

    Several splits may share the file, and it may name images of no split: what it has of those is not lost here. What
    may be of any split, as it has no image, is divided among them.
    """

    normalized = False

    def __init__(self, request: LabelRequest, file: SplitFile) -> None:
        """Matches images by ``file_name`` in the split's folder, else as `ImageNames` does. Raises UserError if the
        file names none of the split's images."""
        self._name = request.files[0].name
        self._annotation_ids = file.annotation_ids
        self.category_ids = file.category_ids
        matched = _match(file.images, request)
        if not matched.entry_of:
            raise self._nothing_fits(request.images, file.images, matched.left)
        listed = sorted(matched.entry_of)
        self.images = [request.images[i] for i in listed]
        self._entries = [matched.entry_of[i] for i in listed]
        self.image_ids: list[int | str] = [entry.image_id for entry in self._entries]
        self.findings = [
            *self._strays(file.strays, matched, request.others),
            *self._absent(matched, request),
            *self._unlisted(request.images, matched),
        ]

    def _strays(self, strays: Sequence[tuple[int, str]], matched: _Matched, others: OtherImages) -> list[Finding]:
        """Returns findings about annotations without an image. They are missing from images that have none now: each
        split counts as many of them as it has of these, or of all images if there are none."""
        ours = sum(not entry.num_labeled for entry in matched.entry_of.values())
        elsewhere = sum(not entry.num_labeled for entry in matched.elsewhere)
        if not ours + elsewhere:
            ours, elsewhere = len(matched.entry_of), len(matched.elsewhere)
        num_charged = _share(len(strays), ours, elsewhere, is_first=others.is_first)
        return [
            Finding(self._annotation(position), STRAY, reason, lost_objects=int(i < num_charged))
            for i, (position, reason) in enumerate(strays)
        ]

    def _absent(self, matched: _Matched, request: LabelRequest) -> list[Finding]:
        """Returns findings about images of the file that the split does not have."""
        owners = _Owners(request.images, request.others)
        findings = []
        of_any_split = []
        for left in matched.left:
            owner = owners.owner(left.entry.file_name)
            if owner == ELSEWHERE:
                continue
            finding = Finding(
                where=f"{self._name}: image {left.entry.image_id}",
                kind=ABSENT,
                text=f"{left.entry.file_name.strip() or 'the empty name'} {left.reason}",
                lost_images=int(left.entry.num_labeled > 0 and owner != ROW),
                lost_objects=left.entry.num_labeled,
            )
            if owner == ANY:
                of_any_split.append(finding)
            else:
                findings.append(finding)
        others = sum(bool(image.key) for image in request.others.images)
        is_first = request.others.is_first
        num_charged = _share(len(of_any_split), len(matched.entry_of), others, is_first=is_first)
        uncharged = [finding._replace(lost_images=0, lost_objects=0) for finding in of_any_split[num_charged:]]
        return findings + of_any_split[:num_charged] + uncharged

    def _unlisted(self, images: Sequence[ImageFile], matched: _Matched) -> list[Finding]:
        """Returns findings about images of the split that the file does not name."""
        return [
            Finding(image.name, UNLISTED, f"{self._name} doesn't name it", consequence="left out")
            for i, image in enumerate(images)
            if i not in matched.entry_of
        ]

    def _nothing_fits(
        self, images: Sequence[ImageFile], entries: Sequence[ImageEntry], left: Sequence[_Left]
    ) -> UserError:
        """Makes the error about a file that names none of the split's images."""
        for each in left:
            if each.has_name:
                shown = one_line(each.entry.file_name)[:200]
                text = f"{self._name}: image {each.entry.image_id}: {shown} {each.reason}"
                return UserError(f"{text}; write file names with their folders")
        first = f" (first: {one_line(entries[0].file_name)[:200]})" if entries else ""
        return UserError(
            f"{self._name}: names {counted(len(entries), 'image')}{first}, none of which is among the split's "
            f"{len(images)} (first: {images[0].key}); check 'annotations' against the split's folder"
        )

    def read(self, i: int) -> RawLabels | None:
        return self._entries[i].labels

    def where(self, i: int, line: int | None = None) -> str:
        return f"{self._name}: image {self.image_ids[i]}" if line is None else self._annotation(line)

    def _annotation(self, position: int) -> str:
        return f"{self._name}: annotation {self._annotation_ids[position]}"


def _share(count: int, ours: int, others: int, *, is_first: bool) -> int:
    """Returns how many of ``count`` things that may be of any split count in this one, which are in proportion to
    ``ours`` against ``others``. The first split counts what the others leave."""
    share = count * ours / (ours + others)
    return math.ceil(share) if is_first else math.floor(share)


class _Left(NamedTuple):
    """An entry that belongs to no image of the split."""

    entry: ImageEntry
    reason: str
    has_name: bool  # whether an image of the split has the same file name


class _Matched(NamedTuple):
    """Says which entries of a label file belong to the images of a split."""

    entry_of: dict[int, ImageEntry]  # by position of the image
    elsewhere: list[ImageEntry]  # those of images of other splits, or of none
    left: list[_Left]  # all others


# Whose image an entry without an image is:
ROW = "listed here"  # a row of the split's lists names it, and counts as the lost image
HERE = "here"
ELSEWHERE = "elsewhere"
ANY = "any"  # of any split with this file


class _Owners:
    """Decides which split an image that does not exist would belong to: the one whose list names it, or the one whose
    folders fit its own best."""

    def __init__(self, images: Sequence[ImageFile], others: OtherImages) -> None:
        self._images = images
        self._others = others

    def owner(self, file_name: str) -> str:
        if self._others.missing and self._missing_here.find(file_name):
            return ROW
        if self._others.missing_elsewhere and self._missing_elsewhere.find(file_name):
            return ELSEWHERE
        here = self._folders_here.agreement(file_name) if self._has_others else 0
        elsewhere = self._folders_elsewhere.agreement(file_name) if self._has_others else 0
        if here == elsewhere:
            return ANY
        return HERE if here > elsewhere else ELSEWHERE

    @cached_property
    def _missing_here(self) -> ImageNames:
        return ImageNames(self._others.missing)

    @cached_property
    def _missing_elsewhere(self) -> ImageNames:
        return ImageNames(self._others.missing_elsewhere)

    @cached_property
    def _has_others(self) -> bool:
        return any(image.key for image in self._others.images)

    @cached_property
    def _folders_here(self) -> _ImageFolders:
        return _ImageFolders(self._images)

    @cached_property
    def _folders_elsewhere(self) -> _ImageFolders:
        return _ImageFolders([image for image in self._others.images if image.key])


class _ImageFolders:
    """Compares the folders of file names with those of images."""

    def __init__(self, images: Sequence[ImageFile]) -> None:
        image_of = {image.name.rpartition("/")[0]: image.name for image in images}
        names_of: dict[str, list[str]] = {}  # an image of each folder, by the folder's own name
        for folder, name in image_of.items():
            names_of.setdefault(loose(folder.rpartition("/")[2]), []).append(name)
        self._images_of = {last: ImageNames(names) for last, names in names_of.items()}

    def agreement(self, file_name: str) -> int:
        """Returns how many last folders of ``file_name`` are those of a folder of images, at most."""
        last_folders = {loose(parts[-2]) for parts in readings_of(file_name) if len(parts) > 1}
        fits = [self._images_of[last] for last in last_folders if last in self._images_of]
        return max((images.agreement(file_name, i) for images in fits for i in range(len(images))), default=0)


def _match(entries: Sequence[ImageEntry], request: LabelRequest) -> _Matched:
    """Matches entries with images: first those whose file names are the images' keys, then all others by name."""
    candidates = [*request.images, *(image for image in request.others.images if image.key)]
    names = ImageNames([image.name for image in candidates])
    image_of = _by_key(entries, candidates)
    entry_of = {image: entries[number] for number, image in image_of.items()}
    matches_of = {number: names.find(entry.file_name) for number, entry in enumerate(entries) if number not in image_of}
    entry_of |= _by_name(entries, matches_of, entry_of, names)

    of_no_split = ImageNames([image.name for image in request.others.images if not image.key])
    known: list[ImageEntry] = []
    left: list[_Left] = []
    for number, matches in matches_of.items():
        reason = _reason(entries[number], matches, candidates, entry_of, names)
        if not reason:
            continue
        each = _Left(entries[number], reason, has_name=bool(matches))
        if _is_of_no_split(each, of_no_split):
            known.append(each.entry)
        else:
            left.append(each)

    num_images = len(request.images)
    ours = {image: entry for image, entry in entry_of.items() if image < num_images}
    of_other_splits = [entry for image, entry in entry_of.items() if image >= num_images]
    return _Matched(ours, of_other_splits + known, left)


def _by_key(entries: Sequence[ImageEntry], images: Sequence[ImageFile]) -> dict[int, int]:
    """Returns the position of the image whose key is the file name of an entry, by the entry's position. Of several
    entries of an image, the first that has annotations is taken: without these, it would be a background."""
    key_counts = Counter(image.key for image in images)  # images of several folders, or of a list, may share one
    by_key = {image.key: i for i, image in enumerate(images) if key_counts[image.key] == 1}
    number_of: dict[int, int] = {}  # positions of entries by those of images
    for number, entry in enumerate(entries):
        i = by_key.get(os.path.normpath(entry.file_name))
        if i is None:
            continue
        if i not in number_of or (entry.num_labeled and not entries[number_of[i]].num_labeled):
            number_of[i] = number
    return {number: i for i, number in number_of.items()}


def _by_name(
    entries: Sequence[ImageEntry], matches_of: dict[int, list[int]], taken: Container[int], names: ImageNames
) -> dict[int, ImageEntry]:
    """Returns the entries that fit one image alone, by its position, unless it is ``taken``.

    Of several entries of an image, the one whose folders agree best is taken, then one that has annotations: a file of
    several splits may name images of another one that has the same file names in another folder.
    """
    numbers_of: dict[int, list[int]] = {}  # positions of entries by those of images
    for number, matches in matches_of.items():
        if len(matches) == 1 and matches[0] not in taken:
            numbers_of.setdefault(matches[0], []).append(number)
    entry_of = {}
    for image, numbers in numbers_of.items():
        rivals = [entries[number] for number in numbers]
        best = rivals[0]
        if len(rivals) > 1:
            best = max(rivals, key=lambda entry: (names.agreement(entry.file_name, image), entry.num_labeled > 0))
        entry_of[image] = best
    return entry_of


def _is_of_no_split(left: _Left, of_no_split: ImageNames) -> bool:
    """Returns whether an entry belongs to an image of no split. If an image of the split has its file name, too, only
    the folder can show that the other one is meant."""
    matches = of_no_split.find(left.entry.file_name)
    if left.has_name:
        return any(of_no_split.agreement(left.entry.file_name, image) for image in matches)
    return bool(matches)


def _reason(
    entry: ImageEntry,
    fits: Sequence[int],
    images: Sequence[ImageFile],
    entry_at: dict[int, ImageEntry],
    names: ImageNames,
) -> str:
    """Returns why an entry, which ``fits`` these images, has none; "" if it has one."""
    if len(fits) > 1:
        shown = f"{images[fits[0]].name} and {images[fits[1]].name}"
        return f"fits {len(fits)} of the split's images, such as {shown}"
    if not fits:
        other = names.same_stem(entry.file_name)
        return "is not among the split's images" + (f", but {other} is" if other else "")
    if entry_at[fits[0]] is not entry:
        return f"would be {images[fits[0]].name}, which another entry names"
    return ""
