"""Defines which label files have been found for the images of a split (`FoundLabels`)."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from data.labels.findings import BAD_LABEL, Finding
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.listing import ImageStatus, ListedImage
from data.source.walk import NO_FILE, access_problem, status_of
from data.split_files import FileStamp, ImageFile, LabelFile


@dataclass(frozen=True, slots=True)
class ImageGroup:
    """The images of one folder, which share their label folders. An image that symbolic links show in several folders
    is in the group of each."""

    folder: str  # absolute
    label_folders: list[str]  # absolute, the usual one first
    images: list[ImageFile]

    @property
    def usual_label_folder(self) -> str:
        return self.label_folders[0]

    @property
    def names(self) -> list[str]:
        return [image.name for image in self.images]


@dataclass(frozen=True, slots=True)
class FoundLabels:
    """The images of a split with their label files."""

    images: list[ListedImage]  # sorted by name
    groups: list[ImageGroup]  # the images under all of their names
    candidates: CandidateFiles  # the files that are not used by any image
    without_usual_label: frozenset[str]  # all names of images without a label file in the usual folder
    findings: list[Finding]
    unusual: dict[str, str]  # label files in other folders or with other names, by image name

    @property
    def is_any_labeled(self) -> bool:
        return any(image.status is ImageStatus.LABELED for image in self.images)


def with_label(image: ImageFile, name: str, file: os.DirEntry | Path) -> ListedImage:
    """Returns an image with its label file ``name``. The image is left out if ``file`` is not a regular file or cannot
    be accessed."""
    status = status_of(file)
    if status is None:
        return _with_no_file(image, LabelFile(name, None), access_problem(file))
    label = LabelFile(name, FileStamp(status.st_size, status.st_mtime_ns))
    if stat.S_ISREG(status.st_mode):
        return ListedImage(image, ImageStatus.LABELED, label)
    return _with_no_file(image, label, "a folder, not a file" if stat.S_ISDIR(status.st_mode) else NO_FILE)


def _with_no_file(image: ImageFile, label: LabelFile, problem: str) -> ListedImage:
    reason = Finding(label.name, BAD_LABEL, f"{problem}; {image.name} is left out", lost_images=1)
    return ListedImage(image, ImageStatus.LEFT_OUT, label, reason)
