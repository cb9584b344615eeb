"""Looks up the files that may be label files: a folder's files that are not used by an image, and their content."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from data.labels.image_names import loose
from data.labels.label_format import MAX_BYTES, FilesPerImage, first_bytes
from data.source.listing.images import OtherFiles, spread
from data.source.walk import Folders, none_if_missing
from utils.files.safe_io import read_regular

SAMPLE_SIZE = 20  # files of a folder that are opened to decide whether it contains labels


class CandidateFile(NamedTuple):
    """A file that may be the label file of an image."""

    folder: str  # absolute
    name: str

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.name)

    def first_bytes(self) -> bytes:
        """Returns the beginning of the file, or b"" if it cannot be read."""
        return first_bytes(self.path)


class CandidateFiles:
    """Looks up the files in a split's label folders that are not used as an image's label file yet.

    Args:
        label_format: defines how label files are found and recognized.
        annotations: the folder of the labels; None if they are where the format expects them.
        folders: directory entries on the disk.
        walked: the files other than images in the image folders that have been walked.
        used: names of the images' label files, by folder. Symbolic links can give a folder several names.
    """

    def __init__(
        self,
        label_format: FilesPerImage,
        annotations: Path | None,
        folders: Folders,
        walked: OtherFiles,
        used: Mapping[str, Set[str]] = MappingProxyType({}),
    ) -> None:
        self.label_format = label_format
        self.annotations = annotations
        self.folders = folders
        self.walked = walked
        self._used = used
        self._by_loose_name: dict[str, dict[str, list[CandidateFile]]] = {}  # by folder
        self._contains_labels: dict[str, bool] = {}  # by folder

    def excluding(self, used: Mapping[str, Iterable[str]]) -> CandidateFiles:
        """Returns the candidates without the files ``used``, names by folder, which are now images' label files."""
        names = dict(self._used)
        for folder, names_in_folder in used.items():
            names[folder] = names.get(folder, frozenset()) | frozenset(names_in_folder)
        return CandidateFiles(self.label_format, self.annotations, self.folders, self.walked, names)

    def is_used(self, file: CandidateFile) -> bool:
        """Returns whether a file is used as an image's label file."""
        return file.name in self._used_in_real.get(self.folders.real(file.folder), frozenset())

    def label_folders(self, image_folder: str, below_split: str = "") -> list[str]:
        """Returns the folders (absolute) that may contain the label files of the images in a folder, the usual one
        first. ``below_split``: the part of ``image_folder`` below the folder that the split names."""
        return self.label_format.label_folders(image_folder, below_split, self.annotations)

    def entries(self, folder: str) -> dict[str, os.DirEntry]:
        """Returns the entries of a folder by name, including unused ones; for a walked folder, without images and
        subfolders."""
        entries = self.walked.get(folder)
        return self.folders.entries(folder) if entries is None else entries

    def names(self, folder: str) -> Collection[str]:
        """Returns the names of candidates in a folder, with any suffix."""
        return self._unused(self.entries(folder), folder)

    def files(self, folder: str) -> list[CandidateFile]:
        """Returns the sorted candidates in a folder that have the suffix of label files."""
        suffix = self.label_format.suffix
        entries = self.entries(folder)
        names = [name for name in self.names(folder) if name[-len(suffix) :].lower() == suffix]
        return [CandidateFile(folder, name) for name in sorted(names) if not none_if_missing(entries[name].is_dir)]

    def folders_in(self, folder: str) -> list[str]:
        """Returns the sorted names of the subfolders of a label folder, without symbolic links."""
        entries = self.folders.entries(folder)
        names = sorted(self._unused(entries, folder))
        return [name for name in names if none_if_missing(entries[name].is_dir) and not entries[name].is_symlink()]

    def by_loose_name(self, folder: str) -> dict[str, list[CandidateFile]]:
        """Returns the `files` of a folder by their `loose` names."""
        if folder not in self._by_loose_name:
            by_name: dict[str, list[CandidateFile]] = {}
            for file in self.files(folder):
                by_name.setdefault(loose(file.name), []).append(file)
            self._by_loose_name[folder] = by_name
        return self._by_loose_name[folder]

    def contains_labels(self, folder: str) -> bool:
        """Returns whether any of a sample of a folder's candidates contain labels. Text files next to images may be
        captions."""
        if folder not in self._contains_labels:
            files = self.files(folder)
            self._contains_labels[folder] = any(self.is_label_file(file) for file in spread(files, SAMPLE_SIZE))
        return self._contains_labels[folder]

    def is_label_file(self, file: CandidateFile) -> bool:
        """Returns whether a file contains labels in the split's format."""
        return self.label_format.is_labels(file.first_bytes())

    def labels(self, path: str) -> bytes | None:
        """Returns the content of the file at ``path`` without the name of its image, or None if it cannot be read.
        Copies of one file for several names of an image are equal."""
        content = none_if_missing(read_regular, path, MAX_BYTES)
        return None if content is None else self.label_format.without_image_name(content)

    def num_objects(self, file: CandidateFile) -> int:
        """Returns the number of objects in a file, 0 if it cannot be read."""
        return self.label_format.num_objects(self.labels(file.path) or b"")

    def have_equal_labels(self, first: str, second: str) -> bool:
        """Returns whether the files at two paths have the same labels. False if either is unreadable."""
        labels = self.labels(first)
        return labels is not None and labels == self.labels(second)

    def without_copies(self, files: Sequence[CandidateFile]) -> Sequence[CandidateFile]:
        """Returns the first of ``files`` if all have the same labels, else all."""
        if len(files) > 1 and all(self.have_equal_labels(files[0].path, other.path) for other in files[1:]):
            return files[:1]
        return files

    def full_name(self, file: CandidateFile) -> str:
        """Returns the name of a file relative to the data set's folder."""
        return self.folders.name_in(file.folder) + file.name

    def _unused(self, entries: dict[str, os.DirEntry], folder: str) -> Collection[str]:
        """Returns the names of those ``entries`` of a folder that are not used."""
        if len(self._used.get(folder, ())) == len(entries):  # fast path for the usual case
            return ()
        return entries.keys() - self._used_in_real.get(self.folders.real(folder), frozenset())

    @cached_property
    def _used_in_real(self) -> dict[str, Set[str]]:
        """The names of used files by the real path of their folder."""
        used: dict[str, Set[str]] = {}
        for folder, names in self._used.items():
            real_folder = self.folders.real(folder)
            used[real_folder] = used.get(real_folder, frozenset()) | names
        return used
