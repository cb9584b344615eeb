"""Finds the label file of each image, where a format has one per image: where the format expects it, with the image's
name and the format's suffix.

`unusual_labels` finds those of the other images under other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.labels.findings import BAD_LABEL, Finding
from data.source.listing.candidate_files import CandidateFiles
from data.source.walk import stamp_of
from data.split_files import ImageFile, LabelFile
from utils.files.paths import path_of


class ListedImage(NamedTuple):
    """An image of a split, and its label file."""

    file: ImageFile
    # Without a stamp: the image has no label file, and would have this one. None: its labels cannot be read, or may be
    # in another file, so the image is left out.
    label: LabelFile | None

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def is_labeled(self) -> bool:
        """Whether the image has a label file that can be read."""
        return self.label is not None and self.label.stamp is not None

    @property
    def is_unlabeled(self) -> bool:
        """Whether the image has no label file."""
        return self.label is not None and self.label.stamp is None

    @property
    def expected_label(self) -> str:
        """Name of the label file that an unlabeled image would have."""
        assert self.label is not None, "only an image that is left out has no expected label file"
        return self.label.name


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
    groups: list[ImageGroup]
    candidates: CandidateFiles  # the files that no image has
    without_usual_label: frozenset[str]  # names of images without a label file where the format expects it
    findings: list[Finding]
    unusual: dict[str, str]  # label files in other places or of other names, by names of images

    def without(self, names: frozenset[str]) -> list[ListedImage]:
        """Returns the images, of which those with these ``names`` are left out."""
        return [image._replace(label=None) if image.name in names else image for image in self.images]


def find_label_files(images: Sequence[ImageFile], candidates: CandidateFiles) -> FoundLabels:
    """Finds the label files of ``images``, which are sorted by name, where the format expects them, under the images'
    names. ``candidates``: all files."""
    groups = _group_by_folder(images, candidates)
    labels: dict[str, LabelFile | None] = {}  # by names of images; see `ListedImage`
    used: dict[str, list[str]] = {}  # names of label files, by folder
    without_label: list[str] = []
    findings: list[Finding] = []
    for group in groups:
        label_folder = group.usual_label_folder
        entries = candidates.entries(label_folder)
        prefix = candidates.folders.name_in(label_folder)
        used_here = used.setdefault(label_folder, [])
        for image in group.images:
            name = image.stem + candidates.label_format.suffix
            entry = entries.get(name)
            if entry is None:
                without_label.append(image.name)
                labels[image.name] = LabelFile(prefix + name, None)
                continue
            used_here.append(name)
            stamp = stamp_of(entry)
            if stamp is None:
                findings.append(link_to_nothing(prefix + name, image.name))
                labels[image.name] = None
            else:
                labels[image.name] = LabelFile(prefix + name, stamp)
    return FoundLabels(
        images=[ListedImage(image, labels[image.name]) for image in images],
        groups=groups,
        candidates=candidates.without(used),
        without_usual_label=frozenset(without_label),
        findings=findings,
        unusual={},
    )


def label_files_of_copy(
    images: Sequence[ImageFile], candidates: CandidateFiles, unusual: Mapping[str, str]
) -> list[ListedImage]:
    """Returns the images of a copy with their label files. ``unusual``: `FoundLabels.unusual` of the original."""
    folders = candidates.folders
    listed = []
    for image in find_label_files(images, candidates).images:
        if image.is_unlabeled and image.name in unusual:
            name = unusual[image.name]
            image = image._replace(label=LabelFile(name, folders.stamp(path_of(name, folders.root))))
        listed.append(image)
    return listed


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


def link_to_nothing(label: str, image: str) -> Finding:
    """Makes the finding about a label file, of the image ``image``, that is a link to nothing."""
    return Finding(label, BAD_LABEL, f"a link to nothing; {image} is left out", lost_images=1)
