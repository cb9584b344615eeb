"""Reports the label files that no image has, and files in other formats that seem to have the labels of an image.

An image without a label file to which such a file may belong is left out: as a background, it would teach the model to
ignore its objects.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.labels.image_names import loose
from data.labels.label_format import FilesPerImage
from data.source.listing.candidate_files import SAMPLE_SIZE, Candidate, have_equal_content
from data.source.listing.label_files import FoundLabels, ImageGroup, ListedImage
from data.source.listing.misplaced_labels import misplaced_labels
from data.source.listing.other_splits import OtherSplits
from data.source.listing.similar_names import loose_stem
from data.source.listing.surroundings import Surroundings
from data.source.listing.unread_labels import unread_labels
from utils.files.paths import path_of


class UnusedReport(NamedTuple):
    """Says which label files of a split are not used, and for which images that is a reason to leave them out."""

    findings: list[Finding]
    left_out: frozenset[str]  # names of images


def report_unused(found: FoundLabels, split_folders: Sequence[str], others: OtherSplits) -> UnusedReport:
    """Reports the label files of a split that no image has. If no image has a label file, none is left out: then the
    split cannot be used at all, for which the findings are the reason.

    Args:
        found: the label files that are used.
        split_folders: the folders that the split names (absolute), without its lists.
        others: the data set's other splits.
    """
    surroundings = Surroundings.of(found, split_folders, others)
    groups_by_folder = _groups_by_label_folder(found)
    unused: Iterator[Finding | Candidate] = _unused_where_expected(groups_by_folder, surroundings)
    if split_folders:
        unused = itertools.chain(unused, misplaced_labels(surroundings, searched=groups_by_folder))
    findings: list[Finding] = []
    doubtful: set[str] = set()  # names of images without a label file to which an unused one may belong
    for each in unused:
        if isinstance(each, Finding):
            findings.append(each)
            continue
        images = surroundings.unlabeled.resembling(loose_stem(each.name))
        newly_doubtful = {image.name for image in images} - doubtful
        findings.append(_orphan(each, _orphan_message(images), surroundings, images_left_out=len(newly_doubtful)))
        doubtful |= newly_doubtful
    findings += _shared_labels(found.images)

    is_any_labeled = any(image.is_labeled for image in found.images)
    max_files = len(found.images) if is_any_labeled else SAMPLE_SIZE
    unlabeled = {image.name: image for image in found.images if image.is_unlabeled}
    for group in found.groups if unlabeled else ():
        images = [unlabeled[name] for name in _names(group) if name in unlabeled and name not in doubtful]
        folders = list(dict.fromkeys((group.usual_label_folder, group.folder)))
        unread = unread_labels(images, folders, found.candidates, max_files)
        findings += [each.finding for each in unread]
        doubtful.update(each.image for each in unread)
    return UnusedReport(findings, frozenset(doubtful if is_any_labeled else ()))


def _names(group: ImageGroup) -> list[str]:
    return [image.name for image in group.images]


def _groups_by_label_folder(found: FoundLabels) -> dict[str, list[ImageGroup]]:
    """Returns the images that may have their labels in a folder, by folder."""
    groups: dict[str, list[ImageGroup]] = {}
    for group in found.groups:
        label_folders = [group.usual_label_folder, group.folder]
        if not found.without_usual_label.isdisjoint(_names(group)):
            label_folders = group.label_folders
        for folder in dict.fromkeys(label_folders):
            groups.setdefault(folder, []).append(group)
    return groups


# Where label files are expected


def _unused_where_expected(
    groups_by_folder: Mapping[str, Sequence[ImageGroup]], surroundings: Surroundings
) -> Iterator[Finding | Candidate]:
    """Yields what is wrong with unused label files in the folders where those of the images are expected; for a file
    that belongs to no image, the file."""
    candidates = surroundings.candidates
    for folder, groups in groups_by_folder.items():
        is_usual = any(folder == group.usual_label_folder for group in groups)
        if not is_usual and not candidates.contains_labels(folder):
            continue
        for file in candidates.files(folder):
            first_bytes = file.first_bytes()
            if not candidates.label_format.is_labels(first_bytes):
                continue
            if not any(_is_reported_here(group, surroundings) for group in groups):
                continue
            stems = _stems_of_its_image(file, first_bytes, candidates.label_format)
            image = surroundings.images_on_disk.find(stems, [group.folder for group in groups])
            if image:
                problem = _problem_with_file_of(image, file, surroundings)
                if problem is not None:
                    yield problem
            elif candidates.annotations is None or surroundings.others.stems.isdisjoint(stems):
                yield file


def _is_reported_here(group: ImageGroup, surroundings: Surroundings) -> bool:
    """Returns whether this split reports the unused label files of a folder of images. If several splits list images of
    one folder, the first split does: these files would be a large fraction of a small split."""
    is_walked = group.folder in surroundings.candidates.walked
    return is_walked or group.folder not in surroundings.others.folders_before


def _stems_of_its_image(file: Candidate, first_bytes: bytes, label_format: FilesPerImage) -> list[str]:
    """Returns the loose stems that the image of a label file may have; that of the file itself comes first."""
    stems = [loose_stem(file.name)]
    image = label_format.named_image(first_bytes) if label_format.named_image is not None else ""
    if image:
        stems += [loose(image), loose_stem(image)]
    return stems


def _problem_with_file_of(name: str, file: Candidate, surroundings: Surroundings) -> Finding | Candidate | None:
    """Returns what is wrong with an unused label file of the image ``name``, which exists; None if nothing is."""
    image = surroundings.image_of_name.get(name)
    if image is None:
        if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
            return None  # the image is in no list, or has a finding of its own
        return _orphan(file, f"its image, {name}, is not read", surroundings)
    if image.is_unlabeled:
        return file
    used = image.label
    root = surroundings.candidates.folders.root
    if used is None or have_equal_content(file.path, path_of(used.name, root)):
        return None
    message = f"{name} has {used.name}, which is used; remove one of the two"
    return Finding(surroundings.candidates.full_name(file), SECOND_LABEL, message)


# Files that belong to no image


def _orphan_message(similar: Sequence[ListedImage]) -> str:
    """Returns what to do with a label file that belongs to no image. ``similar``: the unlabeled images whose names
    resemble its own, which are left out."""
    if not similar:
        return "belongs to no image; rename it like its image, or remove it"
    first = similar[0]
    return f"belongs to no image; if it is that of {first.name}, which is left out, rename it to {first.expected_label}"


def _orphan(file: Candidate, message: str, surroundings: Surroundings, images_left_out: int = 0) -> Finding:
    """Returns the finding about a label file that belongs to no image.

    It counts as the images that are left out because of it. Without such an image it counts as one, unless the split
    lists its images: then the folder may hold the labels of many other images.
    """
    candidates = surroundings.candidates
    is_lost = images_left_out > 0 or bool(surroundings.split_folders)
    return Finding(
        where=candidates.full_name(file),
        kind=ORPHAN,
        text=message,
        lost_images=max(images_left_out, 1) if is_lost else 0,
        lost_objects=candidates.num_objects(file) if is_lost else 0,
    )


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
