"""Finds the label file of each image, where a format has one per image.

A label file is where its format expects it, with the image's name and the format's suffix. Where there is none, other
readings are tried: the format's other folders, names in another case or composition of accents, the image's whole name
before the suffix (``0003.jpg.txt``), and the image that the file itself names. The only one that fits is taken.

`data.source.unused_labels` reports the label files that no image has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.labels.findings import BAD_LABEL, Finding
from data.labels.image_names import ImageNames, loose
from data.labels.label_format import FilesPerImage, ImageFile, LabelFile
from data.source.candidate_files import Candidate, CandidateFiles, without_copies
from data.source.walk import Folders, stamp_of
from utils.files.paths import path_of


@dataclass(slots=True)
class ImageGroup:
    """The images of one folder, whose label files are expected in the same folders."""

    folder: str  # absolute
    label_folders: list[str]  # absolute, the usual one first
    members: list[int] = field(default_factory=list)  # positions of the images
    missing: list[int] = field(default_factory=list)  # members without a label file in the usual folder

    @property
    def usual_label_folder(self) -> str:
        return self.label_folders[0]


@dataclass(slots=True)
class FoundLabels:
    """The label files of a split."""

    images: Sequence[ImageFile]
    groups: list[ImageGroup]
    candidates: CandidateFiles  # knows which files are used
    # One per image, without a stamp if there is none; None: its labels cannot be read, so the image must be left out.
    files: list[LabelFile | None]
    findings: list[Finding] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)  # unusually named label files, by the names of their images

    def is_unlabeled(self, image: int) -> bool:
        """Returns whether an image has no label file."""
        file = self.files[image]
        return file is not None and file.stamp is None

    def expected_name(self, image: int) -> str:
        """Returns the name of the label file that an unlabeled image should have."""
        file = self.files[image]
        assert file is not None, "an unlabeled image has an expected label file"
        return file.name


class LabelSearch:
    """Searches for the label files of a split.

    Args:
        images: sorted by name.
        label_format: how the label files of the format are found.
        annotations: the folder of the labels; None: where the format expects them.
        folders: entries on the disk; a walk through the images has stored the other files next to them.
    """

    def __init__(
        self, images: Sequence[ImageFile], label_format: FilesPerImage, annotations: Path | None, folders: Folders
    ) -> None:
        self._images = images
        self._format = label_format
        self._folders = folders
        self._groups = _group_by_folder(images, label_format, annotations, folders)
        self._candidates = CandidateFiles(label_format, folders)
        self._found = FoundLabels(images, self._groups, self._candidates, files=[None] * len(images))

    def run(self) -> FoundLabels:
        """Returns the label files by all readings, and which of them cannot be used."""
        self._find_in_usual_folders()
        if any(group.missing for group in self._groups):
            self._find_by_similar_name()
            self._find_by_named_image()
        return self._found

    def run_on_copy(self, taken: Mapping[str, str]) -> FoundLabels:
        """Returns the label files of a copy. ``taken``: `FoundLabels.taken` of the original, whose findings hold."""
        self._find_in_usual_folders()
        self._take_as_original(taken)
        self._found.findings.clear()
        return self._found

    def _find_in_usual_folders(self) -> None:
        """Finds the label files that are where the format expects them, under the images' names."""
        files = self._found.files
        for group in self._groups:
            folder = group.usual_label_folder
            entries = self._folders.besides(folder)
            used = self._candidates.used_in(folder)
            prefix = self._folders.name_in(folder)
            name_start = len(self._folders.name_in(group.folder))
            for i in group.members:
                name = os.path.splitext(self._images[i].name)[0][name_start:] + self._format.suffix
                entry = entries.get(name)
                if entry is None:
                    group.missing.append(i)
                    files[i] = LabelFile(prefix + name, None)
                else:
                    files[i] = self._existing(i, prefix + name, entry)
                    used.add(name)

    def _take_as_original(self, taken: Mapping[str, str]) -> None:
        """Gives images without a usual label file those that the original has ``taken`` for them."""
        for i, _ in self._missing():
            image = self._images[i].name
            if image in taken:
                name = taken[image]
                self._found.taken[image] = name
                self._found.files[i] = LabelFile(name, self._folders.stamp(path_of(name, self._folders.root)))

    def _find_by_similar_name(self) -> None:
        """Finds label files in the format's other folders, or whose names only resemble those of the images."""
        # All images choose before any file is used, so that two may have the same one.
        choices = [(i, self._similarly_named(i, group)) for i, group in self._missing()]
        for i, files in choices:
            self._take_only(i, files)

    def _similarly_named(self, image: int, group: ImageGroup) -> Sequence[Candidate]:
        """Returns the files that, by their names, may be the label file of an image."""
        base = self._images[image].name.rpartition("/")[2]
        usual_name = os.path.splitext(base)[0] + self._format.suffix
        name_with_image_suffix = base + self._format.suffix
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
        missing = [i for i, _ in self._missing() if self._found.is_unlabeled(i)]
        names = ImageNames([self._images[i].name for i in missing])
        choices: dict[int, list[Candidate]] = {}
        for folder in dict.fromkeys(folder for group in self._groups for folder in group.label_folders):
            for file in self._candidates.unused(folder):
                name = named_image(file.first_bytes())
                matches = names.find(name) if name else []
                if len(matches) == 1:
                    choices.setdefault(missing[matches[0]], []).append(file)
        for i, files in choices.items():
            self._take_only(i, without_copies(files))

    def _missing(self) -> Iterator[tuple[int, ImageGroup]]:
        """Yields the images without a label file in the usual folder."""
        for group in self._groups:
            for i in group.missing:
                yield i, group

    def _take_only(self, image: int, files: Sequence[Candidate]) -> None:
        """Makes the only one of ``files`` the label file of an image. If there are several, the image is left out."""
        if len(files) == 1:
            self._take(image, files[0])
        elif files:
            self._leave_out(image, files)
        for file in files:
            self._candidates.used_in(file.folder).add(file.name)

    def _take(self, image: int, file: Candidate) -> None:
        name = self._candidates.full_name(file)
        entry = self._folders.besides(file.folder)[file.name]
        self._found.taken[self._images[image].name] = name
        self._found.files[image] = self._existing(image, name, entry)

    def _leave_out(self, image: int, files: Sequence[Candidate]) -> None:
        names = [self._candidates.full_name(file) for file in files]
        finding = Finding(
            where=self._images[image].name,
            kind=BAD_LABEL,
            text=f"its labels may be in {' or '.join(names[:3])}: keep one of them",
            consequence="left out",
            lost_images=1,
            lost_objects=max(self._candidates.num_objects(file) for file in files),
        )
        self._found.findings.append(finding)
        self._found.files[image] = None

    def _existing(self, image: int, name: str, entry: os.DirEntry) -> LabelFile | None:
        """Returns the label file of an image; None, with a finding, if it is a dangling link."""
        stamp = stamp_of(entry)
        if stamp is None:
            message = f"a link to nothing; {self._images[image].name} is left out"
            self._found.findings.append(Finding(name, BAD_LABEL, message, lost_images=1))
            return None
        return LabelFile(name, stamp)


def _group_by_folder(
    images: Sequence[ImageFile], label_format: FilesPerImage, annotations: Path | None, folders: Folders
) -> list[ImageGroup]:
    """Groups images by their folder and the folder in their key, which decide where their labels are expected."""
    groups: dict[tuple[str, str], ImageGroup] = {}
    for i, image in enumerate(images):
        folder_names = (image.name.rpartition("/")[0], image.key.rpartition("/")[0])
        if folder_names not in groups:
            folder = path_of(folder_names[0], folders.root)
            groups[folder_names] = ImageGroup(folder, label_format.folders(folder, folder_names[1], annotations))
        groups[folder_names].members.append(i)
    return list(groups.values())
