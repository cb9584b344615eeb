"""Finds the label file of each image, where a format has one per image: where the format expects it, with the image's
name and the format's suffix.

`unusual_labels` finds those of the other images under other names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data.labels.findings import BAD_LABEL, Finding
from data.source.listing.aliases import real_folders
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.image_list import NO_FILE
from data.source.listing.listing import ImageStatus, ListedImage
from data.source.walk import Folders, status_of
from data.split_files import FileStamp, ImageFile, LabelFile
from utils.files.paths import path_of


@dataclass(frozen=True, slots=True)
class ImageGroup:
    """The images of one folder, whose label files are expected in the same folders."""

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
    groups: list[ImageGroup]  # without those whose images are aliases
    candidates: CandidateFiles  # the files that no image has
    without_usual_label: frozenset[str]  # names of images without a label file where the format expects it
    findings: list[Finding]
    unusual: dict[str, str]  # label files in other places or of other names, by names of images

    @property
    def is_any_labeled(self) -> bool:
        return any(image.status is ImageStatus.LABELED for image in self.images)


def find_label_files(
    images: Sequence[ImageFile], candidates: CandidateFiles, aliases: Mapping[str, Sequence[str]]
) -> FoundLabels:
    """Finds the label files of ``images``, which are sorted by name, where the format expects them, under the images'
    names. ``candidates``: all files; ``aliases``: see `SplitImages`."""
    groups = _group_by_folder(images, candidates)
    repeated = _repeated_groups(groups, real_folders(aliases), candidates.folders)
    listed: dict[str, ListedImage] = {}  # by names of images
    used: dict[str, list[str]] = {}  # names of label files, by folder
    for number, group in enumerate(groups):
        in_group = _with_usual_labels(group, candidates)
        prefix = candidates.folders.name_in(group.usual_label_folder)
        names = [image.label.name[len(prefix) :] for image in in_group if image.status is not ImageStatus.BACKGROUND]
        used.setdefault(group.usual_label_folder, []).extend(names)
        if number in repeated:
            in_group = [image.as_alias() for image in in_group]
        listed.update((image.file.name, image) for image in in_group)
    in_order = [listed[image.name] for image in images]
    return FoundLabels(
        images=in_order,
        groups=[group for number, group in enumerate(groups) if number not in repeated],
        candidates=candidates.excluding(used),
        without_usual_label=frozenset(i.file.name for i in in_order if i.status is ImageStatus.BACKGROUND),
        findings=[image.reason for image in in_order if image.reason is not None],
        unusual={},
    )


def _with_usual_labels(group: ImageGroup, candidates: CandidateFiles) -> list[ListedImage]:
    """Returns the images of a group, each with the file of its name in the usual label folder."""
    entries = candidates.entries(group.usual_label_folder)
    prefix = candidates.folders.name_in(group.usual_label_folder)
    suffix = candidates.label_format.suffix
    listed = []
    for image in group.images:
        name = image.stem + suffix
        entry = entries.get(name)
        if entry is None:
            listed.append(ListedImage(image, ImageStatus.BACKGROUND, LabelFile(prefix + name, None)))
        else:
            listed.append(with_label(image, prefix + name, status_of(entry)))
    return listed


def with_label(image: ImageFile, name: str, status: os.stat_result | None) -> ListedImage:
    """Returns an image with its label file. It is left out if that is no file. ``status``: None for a link to
    nothing."""
    if status is None:
        return _with_no_file(image, LabelFile(name, None), "a link to nothing")
    label = LabelFile(name, FileStamp(status.st_size, status.st_mtime_ns))
    if stat.S_ISREG(status.st_mode):
        return ListedImage(image, ImageStatus.LABELED, label)
    return _with_no_file(image, label, "a folder, not a file" if stat.S_ISDIR(status.st_mode) else NO_FILE)


def _with_no_file(image: ImageFile, label: LabelFile, problem: str) -> ListedImage:
    reason = Finding(label.name, BAD_LABEL, f"{problem}; {image.name} is left out")
    return ListedImage(image, ImageStatus.LEFT_OUT, label, reason)


def _group_by_folder(images: Sequence[ImageFile], candidates: CandidateFiles) -> list[ImageGroup]:
    """Groups images by their folder and that in the split, which decide where their labels are expected."""
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


def _repeated_groups(groups: Sequence[ImageGroup], real_folder_of: Mapping[str, str], folders: Folders) -> set[int]:
    """Returns the positions of groups whose images and label folders earlier ones have: symbolic links show both under
    another name. ``real_folder_of``: see `real_folders`."""
    seen: dict[tuple[str, ...], set[str]] = {}  # base names of images, by the real folders of images and labels
    repeated: set[int] = set()
    if not real_folder_of:
        return repeated
    for number, group in enumerate(groups):
        real_folder = real_folder_of.get(folders.name_in(group.folder))
        if real_folder is None:
            continue
        key = (real_folder, *map(os.path.realpath, group.label_folders))
        base_names = {image.base_name for image in group.images}
        earlier = seen.setdefault(key, set())
        if base_names <= earlier:
            repeated.add(number)
        earlier |= base_names
    return repeated
