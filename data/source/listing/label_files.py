"""Finds the label file of each image, where a format has one per image.

A label file is where its format expects it, with the image's name and the format's suffix. Where there is none, other
readings are tried: the format's other folders, names in another case or composition of accents, the image's whole name
before the suffix (``0003.jpg.txt``), and the image that the file itself names. The only one that fits is taken.

`unused_labels` reports the label files that no image has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from data.labels.findings import BAD_LABEL, Finding
from data.labels.image_names import ImageNames, loose
from data.labels.label_format import ImageFile, LabelFile
from data.source.listing.candidate_files import Candidate, CandidateFiles, without_copies
from data.source.walk import stamp_of
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
    def base_name(self) -> str:
        """The name without folders."""
        return _base_name(self.file)

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


Labels = dict[str, LabelFile | None]  # see `ListedImage`; by names of images


@dataclass(frozen=True, slots=True)
class FoundLabels:
    """The images of a split with their label files."""

    images: list[ListedImage]  # sorted by name
    groups: list[ImageGroup]
    candidates: CandidateFiles  # the files that no image has
    without_usual_label: frozenset[str]  # names of images without a label file where the format expects it
    findings: list[Finding]
    unusual: dict[str, str]  # label files found by other readings, by names of images

    def leave_out(self, names: frozenset[str]) -> list[ListedImage]:
        """Returns the images, of which those with these ``names`` are left out."""
        return [image._replace(label=None) if image.name in names else image for image in self.images]


class _UsualLabels(NamedTuple):
    """The label files that are where the format expects them, under the images' names."""

    labels: Labels  # of all images; without a stamp: there is no such file
    used: dict[str, list[str]]  # names of these files, by folder
    findings: list[Finding]


def find_label_files(images: Sequence[ImageFile], candidates: CandidateFiles) -> FoundLabels:
    """Finds the label files of ``images``, which are sorted by name, by all readings. ``candidates``: all files."""
    groups = _group_by_folder(images, candidates)
    usual = _usual_labels(groups, candidates)
    found = FoundLabels(
        images=[ListedImage(image, usual.labels[image.name]) for image in images],
        groups=groups,
        candidates=candidates.without(usual.used),
        without_usual_label=frozenset(name for name, label in usual.labels.items() if label and not label.stamp),
        findings=usual.findings,
        unusual={},
    )
    if found.without_usual_label:
        found = _with_choices(found, _similarly_named(found))
        found = _with_choices(found, _naming_their_image(found))
    return found


def label_files_of_copy(
    images: Sequence[ImageFile], candidates: CandidateFiles, unusual: Mapping[str, str]
) -> list[ListedImage]:
    """Returns the images of a copy with their label files. ``unusual``: `FoundLabels.unusual` of the original."""
    root = candidates.folders.root
    labels = _usual_labels(_group_by_folder(images, candidates), candidates).labels
    for name, label in labels.items():
        if label and not label.stamp and name in unusual:
            labels[name] = LabelFile(unusual[name], candidates.folders.stamp(path_of(unusual[name], root)))
    return [ListedImage(image, labels[image.name]) for image in images]


def _group_by_folder(images: Sequence[ImageFile], candidates: CandidateFiles) -> list[ImageGroup]:
    """Groups images by their folder and the folder in their key, which decide where their labels are expected."""
    groups: dict[tuple[str, str], ImageGroup] = {}
    for image in images:
        folder_names = (image.name.rpartition("/")[0], image.key.rpartition("/")[0])
        if folder_names not in groups:
            name, below_split = folder_names
            folder = path_of(name, candidates.folders.root)
            groups[folder_names] = ImageGroup(folder, candidates.label_folders(folder, below_split), [])
        groups[folder_names].images.append(image)
    return list(groups.values())


def _usual_labels(groups: Sequence[ImageGroup], candidates: CandidateFiles) -> _UsualLabels:
    """Finds the label files that are where the format expects them, under the images' names."""
    labels: Labels = {}
    used: dict[str, list[str]] = {}
    findings: list[Finding] = []
    for group in groups:
        label_folder = group.usual_label_folder
        entries = candidates.entries(label_folder)
        prefix = candidates.folders.name_in(label_folder)
        used_here = used.setdefault(label_folder, [])
        base_name_start = len(candidates.folders.name_in(group.folder))
        for image in group.images:
            name = os.path.splitext(image.name)[0][base_name_start:] + candidates.label_format.suffix
            entry = entries.get(name)
            if entry is None:
                labels[image.name] = LabelFile(prefix + name, None)
                continue
            used_here.append(name)
            stamp = stamp_of(entry)
            if stamp is None:
                labels[image.name] = None
                findings.append(_link_to_nothing(prefix + name, image.name))
            else:
                labels[image.name] = LabelFile(prefix + name, stamp)
    return _UsualLabels(labels, used, findings)


def _with_choices(found: FoundLabels, choices: Mapping[str, Sequence[Candidate]]) -> FoundLabels:
    """Makes the only one of the files that an image may have its label file. If there are several, the image is left
    out. ``choices``: files by names of images."""
    candidates = found.candidates
    labels: Labels = {}
    unusual: dict[str, str] = {}
    findings: list[Finding] = []
    used: dict[str, list[str]] = {}
    for image, files in choices.items():
        for file in files:
            used.setdefault(file.folder, []).append(file.name)
        if len(files) > 1:
            labels[image] = None
            findings.append(_several_files(image, files, candidates))
        elif files:
            name = candidates.full_name(files[0])
            stamp = candidates.stamp(files[0])
            unusual[image] = name
            labels[image] = LabelFile(name, stamp) if stamp else None
            if stamp is None:
                findings.append(_link_to_nothing(name, image))
    if not labels:
        return found
    return replace(
        found,
        images=[ListedImage(image.file, labels.get(image.name, image.label)) for image in found.images],
        candidates=candidates.without(used),
        findings=found.findings + findings,
        unusual=found.unusual | unusual,
    )


def _similarly_named(found: FoundLabels) -> dict[str, Sequence[Candidate]]:
    """Returns the files in the format's other folders, or with names that only resemble that of an image, by names of
    images without a label file. Two images may have the same file."""
    return {
        image.name: _files_named_like(image, group, found.candidates)
        for group in found.groups
        for image in group.images
        if image.name in found.without_usual_label
    }


def _files_named_like(image: ImageFile, group: ImageGroup, candidates: CandidateFiles) -> Sequence[Candidate]:
    """Returns the files that, by their names, may be the label file of an image."""
    base_name = _base_name(image)
    usual_name = os.path.splitext(base_name)[0] + candidates.label_format.suffix
    name_with_image_suffix = base_name + candidates.label_format.suffix
    matches: list[Candidate] = []
    for folder in group.label_folders:
        by_name = candidates.by_loose_name(folder)
        similar = by_name.get(loose(usual_name)) or by_name.get(loose(name_with_image_suffix)) or []
        exact = [file for file in similar if file.name == usual_name]
        for file in exact or similar:
            # Outside of the usual folder, a file must have labels; an empty one has if others there do.
            is_usual = folder == group.usual_label_folder
            if is_usual or candidates.contains_labels(folder) or candidates.is_label_file(file):
                matches.append(file)
    return without_copies(matches)


def _naming_their_image(found: FoundLabels) -> dict[str, Sequence[Candidate]]:
    """Returns the files that name an image themselves, if the format has such names, by names of images without a label
    file."""
    named_image = found.candidates.label_format.named_image
    if named_image is None:
        return {}
    unlabeled = {image.name for image in found.images if image.is_unlabeled}
    images = [image.name for group in found.groups for image in group.images if image.name in unlabeled]
    names = ImageNames(images)
    choices: dict[str, list[Candidate]] = {}
    for folder in dict.fromkeys(folder for group in found.groups for folder in group.label_folders):
        for file in found.candidates.files(folder):
            name = named_image(file.first_bytes())
            matches = names.find(name) if name else []
            if len(matches) == 1:
                choices.setdefault(images[matches[0]], []).append(file)
    return {image: without_copies(files) for image, files in choices.items()}


def _several_files(image: str, files: Sequence[Candidate], candidates: CandidateFiles) -> Finding:
    names = [candidates.full_name(file) for file in files]
    return Finding(
        where=image,
        kind=BAD_LABEL,
        text=f"its labels may be in {' or '.join(names[:3])}: keep one of them",
        consequence="left out",
        lost_images=1,
        lost_objects=max(candidates.num_objects(file) for file in files),
    )


def _link_to_nothing(label: str, image: str) -> Finding:
    return Finding(label, BAD_LABEL, f"a link to nothing; {image} is left out", lost_images=1)


def _base_name(image: ImageFile) -> str:
    """Returns the name of an image without folders."""
    return image.name.rpartition("/")[2]
