"""Reports the label files that no image has, and files in other formats that seem to have the labels of an image.

An image without a label file to which such a file may belong is left out: as a background, it would teach the model to
ignore its objects.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from data.image_io.decode import IMAGE_SUFFIXES, is_image_name
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL, UNREAD_LABELS, Finding
from data.labels.image_names import loose
from data.labels.label_format import FilesPerImage, ImageFile
from data.labels.other_formats import format_of_labels
from data.source.candidate_files import SAMPLE_SIZE, Candidate, have_equal_content
from data.source.label_files import FoundLabels, ImageGroup
from data.source.walk import Folders, query
from utils.files.paths import path_of


class OtherSplits(Protocol):
    """Answers questions about the data set's other splits, which are listed only if the report asks."""

    is_first: bool  # whether the data set names no split before this one

    @property
    def stems(self) -> frozenset[str]:
        """`loose` names, without suffix, of other images whose labels may be where this split's are."""

    @property
    def folders_before(self) -> frozenset[str]:
        """The folders (absolute) of the images of splits that the data set names before this one."""


class UnusedReport(NamedTuple):
    """What `UnusedLabels` says about a split."""

    findings: list[Finding]
    left_out: frozenset[int]  # positions of images that must be left out


class _NearbyFolder(NamedTuple):
    """A folder in which label files of the split may be by mistake."""

    label_folder: str  # absolute
    image_folder: str  # absolute; its images have their labels in ``label_folder``
    is_shared: bool  # other splits may have labels there, too


class UnusedLabels:
    """Reports the label files of a split that are not used.

    Args:
        found: the label files that are used.
        label_format: how the label files of the format are found and recognized.
        annotations: the folder of the labels; None: where the format expects them.
        folders: entries on the disk.
        entries: the folders that the split names (absolute), without its lists.
        others: the data set's other splits.
    """

    def __init__(
        self,
        found: FoundLabels,
        *,
        label_format: FilesPerImage,
        annotations: Path | None,
        folders: Folders,
        entries: Sequence[str],
        others: OtherSplits,
    ) -> None:
        self._found = found
        self._candidates = found.candidates
        self._format = label_format
        self._annotations = annotations
        self._folders = folders
        self._entries = entries
        self._others = others
        self._findings: list[Finding] = []
        self._doubtful: set[int] = set()  # images without a label file to which an unused one may belong
        self._images_by_stem: dict[str, dict[str, str]] = {}  # see `_images_on_disk`

    def report(self) -> UnusedReport:
        """Returns the findings. If no image has a label file, none is left out: then the split cannot be used at all,
        for which the findings are the reason."""
        is_labeled = any(file is not None and file.stamp is not None for file in self._found.files)
        groups_by_folder = self._groups_by_label_folder()
        self._report_where_expected(groups_by_folder)
        self._report_nearby(searched=groups_by_folder)
        self._report_shared()
        for group in self._found.groups:
            self._report_other_formats(group, max_files=len(self._found.images) if is_labeled else SAMPLE_SIZE)
        return UnusedReport(self._findings, frozenset(self._doubtful if is_labeled else ()))

    # Where label files are expected

    def _groups_by_label_folder(self) -> dict[str, list[ImageGroup]]:
        """Returns the images that may have their labels in a folder, by folder."""
        groups: dict[str, list[ImageGroup]] = {}
        for group in self._found.groups:
            label_folders = [group.usual_label_folder, group.folder]
            if group.missing:
                label_folders = group.label_folders
            for folder in dict.fromkeys(label_folders):
                groups.setdefault(folder, []).append(group)
        return groups

    def _report_where_expected(self, groups_by_folder: dict[str, list[ImageGroup]]) -> None:
        """Reports the unused files in the folders in which the format expects labels."""
        for folder, groups in groups_by_folder.items():
            is_usual = any(folder == group.usual_label_folder for group in groups)
            if not is_usual and not self._candidates.contains_labels(folder):
                continue
            for file in self._candidates.unused(folder):
                first_bytes = file.first_bytes()
                if self._format.is_labels(first_bytes):
                    self._report(file, first_bytes, groups)

    def _report(self, file: Candidate, first_bytes: bytes, groups: Sequence[ImageGroup]) -> None:
        """Reports a file with labels, unless nothing is wrong with it. ``groups``: those whose labels may be in its
        folder."""
        if not any(self._is_reported_here(group) for group in groups):
            return
        stems = self._stems_of_its_image(file, first_bytes)
        image = self._image_on_disk(stems, groups)
        if image:
            self._report_of_image(file, image)
        elif self._annotations is None or self._others.stems.isdisjoint(stems):
            self._report_orphan(file)

    def _is_reported_here(self, group: ImageGroup) -> bool:
        """Returns whether this split reports the unused label files of a folder of images. If several splits list
        images of one folder, the first split does: these files would be a large fraction of a small split."""
        return self._folders.was_walked(group.folder) or group.folder not in self._others.folders_before

    def _stems_of_its_image(self, file: Candidate, first_bytes: bytes) -> list[str]:
        """Returns the loose stems that the image of a label file may have; that of the file itself comes first."""
        stems = [_loose_stem(file.name)]
        image = self._format.named_image(first_bytes) if self._format.named_image is not None else ""
        if image:
            stems += [loose(image), _loose_stem(image)]
        return stems

    def _image_on_disk(self, stems: Sequence[str], groups: Sequence[ImageGroup]) -> str:
        """Returns the name of the image, read or not, that has one of the ``stems``; "" if there is none."""
        for group in groups:
            images = self._images_on_disk(group.folder)
            for stem in stems:
                if stem in images:
                    return self._folders.name_in(group.folder) + images[stem]
        return ""

    def _images_on_disk(self, folder: str) -> dict[str, str]:
        """Returns the names of all images in a folder, including unread ones, by loose stem and by loose name."""
        if folder not in self._images_by_stem:
            names = [name for name in self._folders.entries(folder) if is_image_name(name)]
            by_name = {loose(name): name for name in names}
            by_stem = {_loose_stem(name): name for name in names}
            self._images_by_stem[folder] = by_name | by_stem
        return self._images_by_stem[folder]

    def _report_of_image(self, file: Candidate, image: str) -> None:
        """Reports a file with labels of an image that exists, but has another label file or is not read."""
        i = self._positions.get(image)
        if i is None:
            if os.path.splitext(image)[1].lower() not in IMAGE_SUFFIXES:
                self._add_orphan(file, f"its image, {image}, is not read")
            return  # the image is in no list, or has a finding of its own
        if self._found.is_unlabeled(i):
            self._report_orphan(file)
            return
        used = self._found.files[i]
        if used and not have_equal_content(file.path, path_of(used.name, self._folders.root)):
            message = f"{image} has {used.name}, which is used; remove one of the two"
            self._findings.append(Finding(self._candidates.full_name(file), SECOND_LABEL, message))

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {image.name: i for i, image in enumerate(self._found.images)}

    # Files that belong to no image

    def _report_orphan(self, file: Candidate) -> None:
        """Reports a file with labels that belongs to no image. Unlabeled images with a similar name become doubtful."""
        images = self._unlabeled.resembling(_loose_stem(file.name))
        if not images:
            self._add_orphan(file, "belongs to no image; rename it like its image, or remove it")
            return
        num_left_out = len(set(images) - self._doubtful)
        self._doubtful.update(images)
        image = self._found.images[images[0]].name
        expected = self._found.expected_name(images[0])
        message = f"belongs to no image; if it is that of {image}, which is left out, rename it to {expected}"
        self._add_orphan(file, message, images_left_out=num_left_out)

    def _add_orphan(self, file: Candidate, message: str, images_left_out: int = 0) -> None:
        """Adds a finding. It counts as the images that are left out because of it. Without such an image it counts as
        one, unless the split lists its images: then the folder may hold the labels of many other images."""
        is_lost = images_left_out > 0 or bool(self._entries)
        finding = Finding(
            where=self._candidates.full_name(file),
            kind=ORPHAN,
            text=message,
            lost_images=max(images_left_out, 1) if is_lost else 0,
            lost_objects=self._candidates.num_objects(file) if is_lost else 0,
        )
        self._findings.append(finding)

    @cached_property
    def _unlabeled(self) -> _UnlabeledImages:
        return _UnlabeledImages(self._found)

    @cached_property
    def _labeled_stems(self) -> frozenset[str]:
        """The loose stems of the images with a label file."""
        images = enumerate(self._found.images)
        return frozenset(_image_stem(image) for i, image in images if not self._found.is_unlabeled(i))

    # Folders below and above

    def _report_nearby(self, searched: Container[str]) -> None:
        """Reports files with labels in folders below and above those of the split, except the folders ``searched``."""
        reported: set[Candidate] = set()  # a folder may be near several folders of the split
        for nearby in self._nearby_folders():
            if nearby.label_folder in searched:
                continue
            for file in self._candidates.unused(nearby.label_folder):
                if file in reported or not self._is_misplaced(file, nearby):
                    continue
                if self._candidates.is_label_file(file):
                    reported.add(file)
                    self._report_orphan(file)

    def _nearby_folders(self) -> Iterator[_NearbyFolder]:
        for entry in self._entries:
            yield from self._folders_below(entry)
            if self._annotations is None:
                yield from self._folders_above(entry)

    def _folders_below(self, entry: str) -> Iterator[_NearbyFolder]:
        """Yields the label folder of a folder that the split names, and the folders below."""
        is_shared = self._annotations is not None
        label_folder = self._format.folders(entry, "", self._annotations)[0]
        if label_folder == entry:
            for folder in self._folders.walked_below(entry):
                yield _NearbyFolder(folder, folder, is_shared)
            return
        pending = [_NearbyFolder(label_folder, entry, is_shared)]
        while pending:
            nearby = pending.pop()
            yield nearby
            for name in self._folders_in(nearby.label_folder):
                inner_labels = os.path.join(nearby.label_folder, name)
                inner_images = os.path.join(nearby.image_folder, name)
                pending.append(_NearbyFolder(inner_labels, inner_images, is_shared))

    def _folders_in(self, folder: str) -> list[str]:
        """Returns the names of the folders in a folder of labels, sorted."""
        entries = self._folders.entries(folder)
        used = self._candidates.used_in(folder)
        if len(used) == len(entries):  # the usual case, in a fraction of the time
            return []
        names = sorted(entries.keys() - used)
        return [name for name in names if query(entries[name].is_dir) and not entries[name].is_symlink()]

    def _folders_above(self, entry: str) -> Iterator[_NearbyFolder]:
        """Yields the label folders of the folders above one that the split names, up to ``images``."""
        image_folder = entry
        while os.path.basename(image_folder) != "images":
            image_folder = os.path.dirname(image_folder)
            label_folder = self._format.folders(image_folder, "", None)[0]
            if label_folder == image_folder or Path(image_folder) in self._folders.root.parents:
                return
            yield _NearbyFolder(label_folder, image_folder, is_shared=True)

    def _is_misplaced(self, file: Candidate, nearby: _NearbyFolder) -> bool:
        """Returns whether a file in a nearby folder belongs to no image there, and may belong to one of this split."""
        stem = _loose_stem(file.name)
        if stem in self._images_on_disk(nearby.image_folder) or stem in self._labeled_stems:
            return False
        if stem in self._unlabeled or not nearby.is_shared:
            return True
        return self._others.is_first and stem not in self._others.stems

    # Label files of several images, and files in other formats

    def _report_shared(self) -> None:
        """Reports the label files that several images have."""
        used = [file.name for file in self._found.files if file is not None and file.stamp is not None]
        if len(set(used)) == len(used):
            return
        owners: dict[str, list[str]] = {name: [] for name, count in Counter(used).items() if count > 1}
        for image, file in zip(self._found.images, self._found.files):
            if file is not None and file.name in owners:
                owners[file.name].append(image.name)
        for name, images in owners.items():
            shared = " and ".join(images[:2])
            message = f"used for {shared}; remove all but one of the images, or give each its own labels"
            self._findings.append(Finding(name, SHARED_LABEL, message))

    def _report_other_formats(self, group: ImageGroup, max_files: int) -> None:
        """Reports files that have the names of unlabeled images and seem to have labels, but in another format or with
        another suffix. These images are left out. ``max_files``: files per folder that are opened."""
        unlabeled = {}  # images by loose stem
        for i in group.missing:
            if self._found.is_unlabeled(i) and i not in self._doubtful:
                unlabeled[_image_stem(self._found.images[i])] = i
        if not unlabeled:
            return
        for folder in dict.fromkeys((group.usual_label_folder, group.folder)):
            names = sorted(name for name in self._candidates.unused_names(folder) if not is_image_name(name))
            named_like_images = [name for name in names if self._stem_of_unread(name) in unlabeled]
            for name in named_like_images[:max_files]:
                self._report_if_labels(Candidate(folder, name), unlabeled[self._stem_of_unread(name)])

    def _report_if_labels(self, file: Candidate, image: int) -> None:
        """Reports a file with the name of an unlabeled image if it seems to have labels, once for each image."""
        if image in self._doubtful:
            return
        format_name = format_of_labels(file.first_bytes())
        if not format_name:
            return
        self._doubtful.add(image)
        message = (
            f"seems to have the labels of {self._found.images[image].name}, which is left out ({format_name}; labels "
            f"are read from {self._found.expected_name(image)}, which may be empty)"
        )
        self._findings.append(Finding(self._candidates.full_name(file), UNREAD_LABELS, message, lost_images=1))

    def _stem_of_unread(self, name: str) -> str:
        """Returns the loose stem of the image to which ``00.json``, ``00.png.json``, ``00.txt.bak`` or ``00`` may
        belong."""
        stem = _loose_stem(name)
        begin, suffix = os.path.splitext(stem)
        return begin if suffix == self._format.suffix or is_image_name(stem) else stem


class _UnlabeledImages:
    """Finds the images without a label file by names that resemble theirs."""

    def __init__(self, found: FoundLabels) -> None:
        self._by_stem: dict[str, list[int]] = {}
        self._by_plain_stem: dict[str, list[int]] = {}
        self._by_part: dict[str, list[int]] = {}
        for i, image in enumerate(found.images):
            if not found.is_unlabeled(i):
                continue
            stem = _image_stem(image)
            self._by_stem.setdefault(stem, []).append(i)
            self._by_plain_stem.setdefault(_plain(stem), []).append(i)
            for part in _parts(stem):
                self._by_part.setdefault(part, []).append(i)

    def __contains__(self, stem: str) -> bool:
        return stem in self._by_stem

    def resembling(self, stem: str) -> list[int]:
        """Returns the images whose loose stem is ``stem``; else the only one that has another sign or other leading
        zeros, or that begins or ends with it, or the other way around."""
        if stem in self._by_stem:
            return self._by_stem[stem]
        similar = {*self._by_part.get(stem, ()), *self._by_plain_stem.get(_plain(stem), ())}
        for part in _parts(stem):
            similar.update(self._by_stem.get(part, ()))
        return list(similar) if len(similar) == 1 else []


def _loose_stem(name: str) -> str:
    return loose(os.path.splitext(name)[0])


def _image_stem(image: ImageFile) -> str:
    return _loose_stem(image.name.rpartition("/")[2])


def _parts(stem: str) -> set[str]:
    """Returns the beginnings and ends of a name, cut at punctuation: ``0000`` and ``7436`` for ``0000_7436``."""
    signs = [i for i, character in enumerate(stem) if not character.isalnum()]
    beginnings = {stem[:i] for i in signs}
    ends = {stem[i + 1 :] for i in signs}
    return beginnings | (ends - {""})


def _plain(stem: str) -> str:
    """Normalizes punctuation and leading zeros, so that ``img-007`` and ``img 7`` are equal."""
    return re.sub(r"0+(?=\d)", "", re.sub(r"[\W_]+", "_", stem))
