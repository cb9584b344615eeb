"""Finds the label file of each image, where a format has one per image.

A label file is where its format expects it, with the image's name and the format's suffix. Where there is none, other
readings are tried: the format's other folders, names in another case or composition of accents, the image's whole name
before the suffix (``0003.jpg.txt``), and the image that the file itself names. The only one that fits is taken.

`unused_labels` reports the label files that no image has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from data.labels.findings import BAD_LABEL, Finding
from data.labels.image_names import ImageNames, loose
from data.labels.label_format import ImageFile, LabelFile
from data.source.listing.candidate_files import Candidate, CandidateFiles, without_copies
from data.source.walk import stamp_of
from utils.files.paths import path_of


@dataclass(slots=True, eq=False)
class ListedImage:
    """An image of a split, and its label file."""

    file: ImageFile
    # Without a stamp: the image has no label file, and would have this one. None: its labels cannot be read, or may be
    # in another file, so the image is left out.
    label: LabelFile | None = None

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def base_name(self) -> str:
        """The name without folders."""
        return self.name.rpartition("/")[2]

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


@dataclass(slots=True)
class ImageGroup:
    """The images of one folder, whose label files are expected in the same folders."""

    folder: str  # absolute
    label_folders: list[str]  # absolute, the usual one first
    images: list[ListedImage] = field(default_factory=list)
    without_usual_label: list[ListedImage] = field(default_factory=list)  # no label file where the format expects it

    @property
    def usual_label_folder(self) -> str:
        return self.label_folders[0]


@dataclass(slots=True)
class FoundLabels:
    """The images of a split with their label files."""

    images: list[ListedImage]  # sorted by name
    groups: list[ImageGroup]
    candidates: CandidateFiles  # knows which files are used
    findings: list[Finding] = field(default_factory=list)
    unusual: dict[str, str] = field(default_factory=dict)  # label files found by other readings, by names of images


class LabelSearch:
    """Searches for the label files of a split.

    Args:
        images: sorted by name.
        candidates: files in the folders of the labels, of which those that are found are marked as used.
    """

    def __init__(self, images: Sequence[ImageFile], candidates: CandidateFiles) -> None:
        self._candidates = candidates
        self._folders = candidates.folders
        self._format = candidates.label_format
        listed = [ListedImage(file) for file in images]
        self._found = FoundLabels(listed, _group_by_folder(listed, candidates), candidates)

    def run(self) -> FoundLabels:
        """Returns the label files by all readings, and which of them cannot be used."""
        self._find_in_usual_folders()
        if any(group.without_usual_label for group in self._found.groups):
            self._find_by_similar_name()
            self._find_by_named_image()
        return self._found

    def run_on_copy(self, unusual: Mapping[str, str]) -> FoundLabels:
        """Returns the label files of a copy. ``unusual``: `FoundLabels.unusual` of the original, whose findings
        hold."""
        self._find_in_usual_folders()
        for image, _ in self._without_usual_label():
            if image.name in unusual:
                label = unusual[image.name]
                self._found.unusual[image.name] = label
                image.label = LabelFile(label, self._folders.stamp(path_of(label, self._folders.root)))
        self._found.findings.clear()
        return self._found

    def _find_in_usual_folders(self) -> None:
        """Finds the label files that are where the format expects them, under the images' names."""
        for group in self._found.groups:
            label_folder = group.usual_label_folder
            entries = self._folders.non_images(label_folder)
            prefix = self._folders.name_in(label_folder)
            base_name_start = len(self._folders.name_in(group.folder))
            used = []
            for image in group.images:
                name = os.path.splitext(image.file.name)[0][base_name_start:] + self._format.suffix
                entry = entries.get(name)
                if entry is None:
                    group.without_usual_label.append(image)
                    image.label = LabelFile(prefix + name, None)
                else:
                    image.label = self._existing(image, prefix + name, entry)
                    used.append(name)
            self._candidates.mark_used(label_folder, used)

    def _find_by_similar_name(self) -> None:
        """Finds label files in the format's other folders, or whose names only resemble those of the images."""
        # All images choose before any file is used, so that two may have the same one.
        choices = [(image, self._similarly_named(image, group)) for image, group in self._without_usual_label()]
        for image, files in choices:
            self._take_only(image, files)

    def _similarly_named(self, image: ListedImage, group: ImageGroup) -> Sequence[Candidate]:
        """Returns the files that, by their names, may be the label file of an image."""
        usual_name = os.path.splitext(image.base_name)[0] + self._format.suffix
        name_with_image_suffix = image.base_name + self._format.suffix
        matches: list[Candidate] = []
        for folder in group.label_folders:
            unused = self._candidates.unused_by_loose_name(folder)
            similar = unused.get(loose(usual_name)) or unused.get(loose(name_with_image_suffix)) or []
            exact = [file for file in similar if file.name == usual_name]
            for file in exact or similar:
                if folder == group.usual_label_folder or self._has_labels(file):
                    matches.append(file)
        return without_copies(matches)

    def _has_labels(self, file: Candidate) -> bool:
        """Returns whether a file outside of the usual folder has labels; an empty one has if others there do."""
        return self._candidates.contains_labels(file.folder) or self._candidates.is_label_file(file)

    def _find_by_named_image(self) -> None:
        """Finds the label files that name their image themselves, if the format has such names."""
        named_image = self._format.named_image
        if named_image is None:
            return
        unlabeled = [image for image, _ in self._without_usual_label() if image.is_unlabeled]
        names = ImageNames([image.name for image in unlabeled])
        choices: dict[ListedImage, list[Candidate]] = {}
        for folder in dict.fromkeys(folder for group in self._found.groups for folder in group.label_folders):
            for file in self._candidates.unused(folder):
                name = named_image(file.first_bytes())
                matches = names.find(name) if name else []
                if len(matches) == 1:
                    choices.setdefault(unlabeled[matches[0]], []).append(file)
        for image, files in choices.items():
            self._take_only(image, without_copies(files))

    def _without_usual_label(self) -> Iterator[tuple[ListedImage, ImageGroup]]:
        """Yields the images without a label file where the format expects it."""
        for group in self._found.groups:
            for image in group.without_usual_label:
                yield image, group

    def _take_only(self, image: ListedImage, files: Sequence[Candidate]) -> None:
        """Makes the only one of ``files`` the label file of an image. If there are several, the image is left out."""
        if len(files) == 1:
            self._take(image, files[0])
        elif files:
            self._leave_out(image, files)
        for file in files:
            self._candidates.mark_used(file.folder, [file.name])

    def _take(self, image: ListedImage, file: Candidate) -> None:
        name = self._candidates.full_name(file)
        entry = self._folders.non_images(file.folder)[file.name]
        self._found.unusual[image.name] = name
        image.label = self._existing(image, name, entry)

    def _leave_out(self, image: ListedImage, files: Sequence[Candidate]) -> None:
        names = [self._candidates.full_name(file) for file in files]
        finding = Finding(
            where=image.name,
            kind=BAD_LABEL,
            text=f"its labels may be in {' or '.join(names[:3])}: keep one of them",
            consequence="left out",
            lost_images=1,
            lost_objects=max(self._candidates.num_objects(file) for file in files),
        )
        self._found.findings.append(finding)
        image.label = None

    def _existing(self, image: ListedImage, name: str, entry: os.DirEntry) -> LabelFile | None:
        """Returns the label file of an image; None, with a finding, if it is a dangling link."""
        stamp = stamp_of(entry)
        if stamp is None:
            message = f"a link to nothing; {image.name} is left out"
            self._found.findings.append(Finding(name, BAD_LABEL, message, lost_images=1))
            return None
        return LabelFile(name, stamp)


def _group_by_folder(images: Sequence[ListedImage], candidates: CandidateFiles) -> list[ImageGroup]:
    """Groups images by their folder and the folder in their key, which decide where their labels are expected."""
    groups: dict[tuple[str, str], ImageGroup] = {}
    for image in images:
        folder_names = (image.file.name.rpartition("/")[0], image.file.key.rpartition("/")[0])
        if folder_names not in groups:
            name, below_split = folder_names
            folder = path_of(name, candidates.folders.root)
            groups[folder_names] = ImageGroup(folder, candidates.label_folders(folder, below_split))
        groups[folder_names].images.append(image)
    return list(groups.values())
