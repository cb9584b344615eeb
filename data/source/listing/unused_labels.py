"""Reports the label files that no image has, and files in other formats that seem to have the labels of an image.

An image without a label file to which such a file may belong is left out: as a background, it would teach the model to
ignore its objects.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.labels.image_names import loose
from data.source.listing.candidate_files import SAMPLE_SIZE, Candidate, have_equal_content
from data.source.listing.label_files import FoundLabels, ImageGroup, ListedImage
from data.source.listing.misplaced_labels import MisplacedLabels
from data.source.listing.other_splits import OtherSplits
from data.source.listing.similar_names import ImagesOnDisk, UnlabeledImages, loose_stem
from data.source.listing.unread_labels import unread_labels
from utils.files.paths import path_of


class UnusedReport(NamedTuple):
    """What `UnusedLabels` says about a split."""

    findings: list[Finding]
    left_out: frozenset[ListedImage]


class UnusedLabels:
    """Reports the label files of a split that are not used.

    Args:
        found: the label files that are used.
        split_folders: the folders that the split names (absolute), without its lists.
        others: the data set's other splits.
    """

    def __init__(self, found: FoundLabels, split_folders: Sequence[str], others: OtherSplits) -> None:
        self._found = found
        self._candidates = found.candidates
        self._format = found.candidates.label_format
        self._folders = found.candidates.folders
        self._split_folders = split_folders
        self._others = others
        self._images_on_disk = ImagesOnDisk(self._folders)
        self._findings: list[Finding] = []
        self._doubtful: set[ListedImage] = set()  # images without a label file to which an unused one may belong

    def report(self) -> UnusedReport:
        """Returns the findings. If no image has a label file, none is left out: then the split cannot be used at all,
        for which the findings are the reason."""
        groups_by_folder = self._groups_by_label_folder()
        for folder, groups in groups_by_folder.items():
            self._report_where_expected(folder, groups)
        if self._split_folders:
            for file in self._misplaced_labels().files(searched=groups_by_folder):
                self._report_orphan(file)
        self._findings += _shared_labels(self._found.images)
        is_any_labeled = any(image.is_labeled for image in self._found.images)
        max_files = len(self._found.images) if is_any_labeled else SAMPLE_SIZE
        for group in self._found.groups:
            self._findings += unread_labels(group, self._candidates, self._doubtful, max_files)
        return UnusedReport(self._findings, frozenset(self._doubtful if is_any_labeled else ()))

    def _misplaced_labels(self) -> MisplacedLabels:
        return MisplacedLabels(
            self._found,
            split_folders=self._split_folders,
            others=self._others,
            unlabeled=self._unlabeled,
            images_on_disk=self._images_on_disk,
        )

    # Where label files are expected

    def _groups_by_label_folder(self) -> dict[str, list[ImageGroup]]:
        """Returns the images that may have their labels in a folder, by folder."""
        groups: dict[str, list[ImageGroup]] = {}
        for group in self._found.groups:
            label_folders = [group.usual_label_folder, group.folder]
            if group.without_usual_label:
                label_folders = group.label_folders
            for folder in dict.fromkeys(label_folders):
                groups.setdefault(folder, []).append(group)
        return groups

    def _report_where_expected(self, folder: str, groups: Sequence[ImageGroup]) -> None:
        """Reports the unused files in a folder in which the format expects the labels of ``groups``."""
        is_usual = any(folder == group.usual_label_folder for group in groups)
        if not is_usual and not self._candidates.contains_labels(folder):
            return
        for file in self._candidates.unused(folder):
            first_bytes = file.first_bytes()
            if self._format.is_labels(first_bytes) and any(self._is_reported_here(group) for group in groups):
                self._report(file, first_bytes, groups)

    def _is_reported_here(self, group: ImageGroup) -> bool:
        """Returns whether this split reports the unused label files of a folder of images. If several splits list
        images of one folder, the first split does: these files would be a large fraction of a small split."""
        return self._folders.was_walked(group.folder) or group.folder not in self._others.folders_before

    def _report(self, file: Candidate, first_bytes: bytes, groups: Sequence[ImageGroup]) -> None:
        """Reports a file with labels, unless nothing is wrong with it. ``groups``: those whose labels may be in its
        folder."""
        stems = self._stems_of_its_image(file, first_bytes)
        image = self._images_on_disk.find(stems, [group.folder for group in groups])
        if image:
            self._report_of_image(file, image)
        elif self._candidates.annotations is None or self._others.stems.isdisjoint(stems):
            self._report_orphan(file)

    def _stems_of_its_image(self, file: Candidate, first_bytes: bytes) -> list[str]:
        """Returns the loose stems that the image of a label file may have; that of the file itself comes first."""
        stems = [loose_stem(file.name)]
        image = self._format.named_image(first_bytes) if self._format.named_image is not None else ""
        if image:
            stems += [loose(image), loose_stem(image)]
        return stems

    def _report_of_image(self, file: Candidate, name: str) -> None:
        """Reports a file with labels of the image ``name``, which exists, but has another label file or is not read."""
        image = self._image_by_name.get(name)
        if image is None:
            if os.path.splitext(name)[1].lower() not in IMAGE_SUFFIXES:
                self._add_orphan(file, f"its image, {name}, is not read")
            return  # the image is in no list, or has a finding of its own
        if image.is_unlabeled:
            self._report_orphan(file)
            return
        used = image.label
        if used and not have_equal_content(file.path, path_of(used.name, self._folders.root)):
            message = f"{name} has {used.name}, which is used; remove one of the two"
            self._findings.append(Finding(self._candidates.full_name(file), SECOND_LABEL, message))

    @cached_property
    def _image_by_name(self) -> dict[str, ListedImage]:
        return {image.name: image for image in self._found.images}

    # Files that belong to no image

    def _report_orphan(self, file: Candidate) -> None:
        """Reports a file with labels that belongs to no image. Unlabeled images with a similar name become doubtful."""
        images = self._unlabeled.resembling(loose_stem(file.name))
        if not images:
            self._add_orphan(file, "belongs to no image; rename it like its image, or remove it")
            return
        num_left_out = len(set(images) - self._doubtful)
        self._doubtful.update(images)
        first = images[0]
        message = (
            f"belongs to no image; if it is that of {first.name}, which is left out, rename it to "
            f"{first.expected_label}"
        )
        self._add_orphan(file, message, images_left_out=num_left_out)

    def _add_orphan(self, file: Candidate, message: str, images_left_out: int = 0) -> None:
        """Adds a finding. It counts as the images that are left out because of it. Without such an image it counts as
        one, unless the split lists its images: then the folder may hold the labels of many other images."""
        is_lost = images_left_out > 0 or bool(self._split_folders)
        finding = Finding(
            where=self._candidates.full_name(file),
            kind=ORPHAN,
            text=message,
            lost_images=max(images_left_out, 1) if is_lost else 0,
            lost_objects=self._candidates.num_objects(file) if is_lost else 0,
        )
        self._findings.append(finding)

    @cached_property
    def _unlabeled(self) -> UnlabeledImages:
        return UnlabeledImages(self._found.images)


def _shared_labels(images: Sequence[ListedImage]) -> list[Finding]:
    """Returns findings about the label files that several images have."""
    names = [image.label.name for image in images if image.label is not None and image.label.stamp is not None]
    shared_names = {name for name, count in Counter(names).items() if count > 1}
    owners: dict[str, list[str]] = {}  # names of images, by label file
    for image in images if shared_names else ():
        if image.label is not None and image.label.name in shared_names:
            owners.setdefault(image.label.name, []).append(image.name)
    findings = []
    for name, image_names in owners.items():
        shown = " and ".join(image_names[:2])
        message = f"used for {shown}; remove all but one of the images, or give each its own labels"
        findings.append(Finding(name, SHARED_LABEL, message))
    return findings
