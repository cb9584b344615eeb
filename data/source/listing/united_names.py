"""Unites the names that links to folders give an image, with the label files found under them.

If two names have files with different labels, the image is listed twice, each time with its own labels. A file without
objects, or one that cannot be read, does not count as different if another one has objects. Files where the format
expects them come first: other files (`unusual_labels`) are looked for only if none of the names has one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from data.labels.findings import LABELED_PER_NAME, SECOND_LABEL, Finding
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of


class UnitedNames(NamedTuple):
    """An image, once for each label file with different labels, and what is wrong with its label files."""

    images: list[ListedImage]
    findings: list[Finding]  # without a loss


class _FoundFile(NamedTuple):
    """A label file that is found under names of an image."""

    images: list[ListedImage]  # the image under these names
    labels: bytes | None  # see `CandidateFiles.labels`
    num_objects: int

    @property
    def label_name(self) -> str:
        return self.images[0].label.name


def unite_names(same_image: Sequence[ListedImage], candidates: CandidateFiles) -> UnitedNames:
    """Returns an image once for each label file that has objects and differs from the others, under the first name with
    which the file is found, or once if no file has objects.

    ``same_image``: the image under each of its names, the usual one first, with the label file found under that name.
    """
    names_of_file = _names_by_label_file(same_image, candidates)
    if len(names_of_file) <= 1:  # fast path for the usual case: the file need not be read
        with_file = next(iter(names_of_file.values()), same_image)
        return UnitedNames([_united(with_file[0], same_image)], [])
    files = [_read(path, names, candidates) for path, names in names_of_file.items()]
    names_of_labels = _names_by_labels(files)
    if names_of_labels:
        images = _once_per_labels(names_of_labels, same_image)
        return UnitedNames(images, [*_files_without_objects(files, images[0]), *_listed_again(images)])
    # If a file cannot be read, an empty one beside it doesn't show that the image is a background.
    file = next((file for file in files if file.labels is None), files[0])
    return UnitedNames([_united(file.images[0], same_image)], [])


def _names_by_label_file(same_image: Sequence[ListedImage], candidates: CandidateFiles) -> dict[str, list[ListedImage]]:
    """Groups the names of an image by the real path of their label file, without names that have none."""
    names_of_file: dict[str, list[ListedImage]] = {}
    for image in same_image:
        if image.status is not ImageStatus.BACKGROUND:
            path = os.path.realpath(path_of(image.label.name, candidates.folders.root))
            names_of_file.setdefault(path, []).append(image)
    return names_of_file


def _read(path: str, names: list[ListedImage], candidates: CandidateFiles) -> _FoundFile:
    """Reads a label file. ``names``: the image under the names with which the file is found."""
    labels = candidates.labels(path)
    return _FoundFile(names, labels, candidates.label_format.num_objects(labels) if labels else 0)


def _names_by_labels(files: Sequence[_FoundFile]) -> list[list[ListedImage]]:
    """Groups the names of an image by the labels in their files, without files that have no objects."""
    names_of_labels: dict[bytes | None, list[ListedImage]] = {}
    for file in files:
        if file.num_objects:
            names_of_labels.setdefault(file.labels, []).extend(file.images)
    return list(names_of_labels.values())


def _once_per_labels(
    names_of_labels: Sequence[list[ListedImage]], same_image: Sequence[ListedImage]
) -> list[ListedImage]:
    """Returns an image once for each group of its names. Names without objects of their own become aliases of the
    first."""
    first, *others = names_of_labels
    names_of_others = {image.name for names in others for image in names}
    names_of_first = [image for image in same_image if image.name not in names_of_others]
    return [_united(first[0], names_of_first), *(_united(names[0], names) for names in others)]


def _united(image: ListedImage, same_image: Sequence[ListedImage]) -> ListedImage:
    """Returns an image with its other names among ``same_image`` as aliases."""
    return image._replace(aliases=tuple(other.file for other in same_image if other.name != image.name))


def _files_without_objects(files: Sequence[_FoundFile], image: ListedImage) -> list[Finding]:
    """Returns findings about the files without objects, which are replaced by that of ``image``."""
    findings: list[Finding] = []
    for file in files:
        if not file.num_objects:
            problem = "cannot be read" if file.labels is None else "has no objects"
            message = f"{problem}; the labels in {image.label.name} are used"
            findings.append(Finding(file.label_name, SECOND_LABEL, message))
    return findings


def _listed_again(images: Sequence[ListedImage]) -> list[Finding]:
    """Returns findings about an image that is listed several times, except the first time."""
    first, *others = images
    message = f"{first.name}, which has {first.label.name}, is used a second time with these labels"
    return [Finding(image.label.name, LABELED_PER_NAME, message) for image in others]
