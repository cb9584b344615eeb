"""Finds the label file of each image in formats with one per image: in the folder where the format expects it, with the
image's name and the format's suffix.

`unusual_labels` searches for the other images' label files in other folders and under other names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from data.labels.findings import BAD_LABEL, Finding
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.image_list import NO_FILE
from data.source.listing.images import SplitImages
from data.source.listing.listing import ImageStatus, ListedImage
from data.source.listing.views import Views, views_of_image
from data.source.walk import status_of
from data.split_files import FileStamp, ImageFile, LabelFile
from utils.files.paths import path_of


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


def find_label_files(split_images: SplitImages, candidates: CandidateFiles) -> FoundLabels:
    """Finds the label files in the usual folders that have the images' names. ``candidates``: all files."""
    groups = _group_by_folder([*split_images.sorted(), *split_images.all_aliases], candidates)
    images: list[ListedImage] = []
    used: dict[str, list[str]] = {}  # names of label files, by folder
    for group in groups:
        in_group, used_in_group = _with_usual_labels(group, candidates)
        images += in_group
        used.setdefault(group.usual_label_folder, []).extend(used_in_group)
    findings: list[Finding] = []
    if split_images.aliases:
        images, findings = _unite_names(images, split_images.aliases, candidates)
    if len(groups) > 1:
        images.sort(key=attrgetter("file.name"))
    unlabeled = [image for image in images if image.status is ImageStatus.BACKGROUND]
    return FoundLabels(
        images=images,
        groups=groups,
        candidates=candidates.excluding(used),
        without_usual_label=frozenset(file.name for image in unlabeled for file in image.names),
        findings=findings + [image.reason for image in images if image.reason is not None],
        unusual={},
    )


def _with_usual_labels(group: ImageGroup, candidates: CandidateFiles) -> tuple[list[ListedImage], list[str]]:
    """Returns the images of a group, each with the label file of the same name in the usual label folder, and the names
    of these label files."""
    entries = candidates.entries(group.usual_label_folder)
    prefix = candidates.folders.name_in(group.usual_label_folder)
    image_prefix = len(group.images[0].name) - len(group.images[0].base_name)
    suffix = candidates.label_format.suffix
    images: list[ListedImage] = []
    label_names: list[str] = []
    for image in group.images:
        name = image.name[image_prefix:].rpartition(".")[0] + suffix  # much faster than its `stem`
        entry = entries.get(name)
        if entry is None:
            images.append(ListedImage(image, ImageStatus.BACKGROUND, LabelFile(prefix + name, None)))
        else:
            images.append(with_label(image, prefix + name, status_of(entry)))
            label_names.append(name)
    return images, label_names


def _unite_names(
    named_images: Sequence[ListedImage], aliases: Mapping[str, Sequence[ImageFile]], candidates: CandidateFiles
) -> Views:
    """Merges ``named_images``, each image under each of its names, into one entry per label file. ``aliases``: see
    `find_aliases`."""
    image_of_name = {image.name: image for image in named_images}
    united = Views([], [])
    for usual_name, others in aliases.items():
        names = (usual_name, *(other.name for other in others))
        views = views_of_image([image_of_name.pop(name) for name in names], candidates)
        united.images.extend(views.images)
        united.findings.extend(views.findings)
    united.images.extend(image_of_name.values())  # those with one name
    return united


def with_label(image: ImageFile, name: str, status: os.stat_result | None) -> ListedImage:
    """Returns an image with its label file. The image is left out if its label file is not a regular file. ``status``:
    None for a broken link."""
    if status is None:
        return _with_no_file(image, LabelFile(name, None), "a broken link")
    label = LabelFile(name, FileStamp(status.st_size, status.st_mtime_ns))
    if stat.S_ISREG(status.st_mode):
        return ListedImage(image, ImageStatus.LABELED, label)
    return _with_no_file(image, label, "a folder, not a file" if stat.S_ISDIR(status.st_mode) else NO_FILE)


def _with_no_file(image: ImageFile, label: LabelFile, problem: str) -> ListedImage:
    reason = Finding(label.name, BAD_LABEL, f"{problem}; {image.name} is left out", lost_images=1)
    return ListedImage(image, ImageStatus.LEFT_OUT, label, reason)


def _group_by_folder(images: Sequence[ImageFile], candidates: CandidateFiles) -> list[ImageGroup]:
    """Groups images by their folder and their folder within the split, which determine their label folders."""
    groups: dict[tuple[str, str], ImageGroup] = {}
    for image in images:
        folder_names = (image.name.rpartition("/")[0], image.name_in_split.rpartition("/")[0])
        group = groups.get(folder_names)
        if group is None:
            name, below_split = folder_names
            folder = path_of(name, candidates.folders.root)
            group = ImageGroup(folder, candidates.label_folders(folder, below_split), [])
            groups[folder_names] = group
        group.images.append(image)
    return list(groups.values())
