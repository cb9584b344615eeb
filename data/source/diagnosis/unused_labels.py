"""Diagnoses a split whose label files are not exactly one for each image: label files that no image has, or several
have, and files in other formats that seem to have the labels of an image.

An image without a label file to which such a file may belong is left out: as a background, it would teach the model to
ignore its objects.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.labels.image_names import loose
from data.labels.label_format import FilesPerImage
from data.source.diagnosis.misplaced_labels import misplaced_labels
from data.source.diagnosis.other_splits import OtherSplits
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.surroundings import Surroundings
from data.source.diagnosis.unread_labels import UnreadLabels, unread_labels
from data.source.listing.candidate_files import SAMPLE_SIZE, Candidate, have_equal_content
from data.source.listing.label_files import FoundLabels, ImageGroup, ListedImage
from data.source.listing.label_folders import expected_folders
from utils.files.paths import path_of


class Diagnosis(NamedTuple):
    """Says which label files of a split are not used, and for which images that is a reason to leave them out."""

    findings: list[Finding]
    left_out: frozenset[str]  # names of images


class _UnusedFile(NamedTuple):
    """A label file that no image has."""

    file: Candidate
    finding: Finding | None  # what is wrong with it; None: its image is not known


def diagnose_labels(found: FoundLabels, split_folders: Sequence[str], others: OtherSplits) -> Diagnosis:
    """Reports the label files of a split that no image has. If no image has a label file, none is left out: then the
    split cannot be used at all, for which the findings are the reason.

    Args:
        found: the label files that are used.
        split_folders: the folders that the split names (absolute), without its lists.
        others: the data set's other splits.
    """
    surroundings = Surroundings.of(found, split_folders, others)
    groups_by_folder = expected_folders(found)
    unused = list(_unused_where_expected(groups_by_folder, surroundings))
    if split_folders:
        misplaced = misplaced_labels(surroundings, searched=groups_by_folder)
        unused += [_UnusedFile(file, finding=None) for file in misplaced]
    similar = {
        each.file: surroundings.unlabeled.resembling(loose_stem(each.file.name))
        for each in unused
        if each.finding is None
    }
    images_left_out = _each_with_first(similar)
    findings = []
    for file, finding in unused:
        if finding is None:
            message = _orphan_message(similar[file])
            finding = _orphan(file, message, surroundings, images_left_out=len(images_left_out[file]))
        findings.append(finding)
    findings += _shared_labels(found.images)

    left_out = {image for images in images_left_out.values() for image in images}
    is_any_labeled = any(image.is_labeled for image in found.images)
    unread = _unread_labels(found, left_out, max_files=len(found.images) if is_any_labeled else SAMPLE_SIZE)
    findings += [each.finding for each in unread]
    left_out.update(each.image for each in unread)
    return Diagnosis(findings, frozenset(left_out if is_any_labeled else ()))


def _each_with_first(similar: Mapping[Candidate, Sequence[ListedImage]]) -> dict[Candidate, set[str]]:
    """Returns the names of the images that each file resembles, each image with the first of its files only, so that
    its loss counts once."""
    assigned: set[str] = set()
    images_of: dict[Candidate, set[str]] = {}
    for file, images in similar.items():
        images_of[file] = {image.name for image in images} - assigned
        assigned |= images_of[file]
    return images_of


def _unread_labels(found: FoundLabels, left_out: Collection[str], max_files: int) -> list[UnreadLabels]:
    """Returns the files that seem to have the labels of an unlabeled image, without those of images that are
    ``left_out`` already. ``max_files``: files per folder that are opened."""
    unlabeled = {image.name: image for image in found.images if image.is_unlabeled and image.name not in left_out}
    unread: list[UnreadLabels] = []
    for group in found.groups:
        images = [unlabeled[name] for name in group.names if name in unlabeled]
        folders = list(dict.fromkeys((group.usual_label_folder, group.folder)))
        unread += unread_labels(images, folders, found.candidates, max_files)
    return unread


# Where label files are expected


def _unused_where_expected(
    groups_by_folder: Mapping[str, Sequence[ImageGroup]], surroundings: Surroundings
) -> Iterator[_UnusedFile]:
    """Yields the unused label files in the folders where those of the images are expected."""
    candidates = surroundings.candidates
    for folder, groups in groups_by_folder.items():
        is_usual = any(folder == group.usual_label_folder for group in groups)
        if not is_usual and not candidates.contains_labels(folder):
            continue
        files = candidates.files(folder)
        if not files or not any(_is_reported_here(group, surroundings) for group in groups):
            continue
        for file in files:
            first_bytes = file.first_bytes()
            if not candidates.label_format.is_labels(first_bytes):
                continue
            stems = _stems_of_its_image(file, first_bytes, candidates.label_format)
            image = surroundings.images_on_disk.find(stems, [group.folder for group in groups])
            if image:
                yield from _unused_file_of(image, file, surroundings)
            elif candidates.annotations is None or surroundings.others.stems.isdisjoint(stems):
                yield _UnusedFile(file, finding=None)


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


def _unused_file_of(name: str, file: Candidate, surroundings: Surroundings) -> Iterator[_UnusedFile]:
    """Yields an unused label file of the image ``name``, which exists, unless there is nothing wrong with that."""
    image = surroundings.image_of_name.get(name)
    if image is None:
        if os.path.splitext(name)[1].lower() not in IMAGE_SUFFIXES:  # else no list names it, or it has a finding
            yield _UnusedFile(file, _orphan(file, f"its image, {name}, is not read", surroundings))
    elif image.is_unlabeled:
        yield _UnusedFile(file, finding=None)
    elif image.label is not None:
        used = image.label.name
        if not have_equal_content(file.path, path_of(used, surroundings.candidates.folders.root)):
            message = f"{name} has {used}, which is used; remove one of the two"
            yield _UnusedFile(file, Finding(surroundings.candidates.full_name(file), SECOND_LABEL, message))


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
    owners: dict[str, list[str]] = {}  # names of images, by label file
    for image in images:
        if image.label is not None and image.label.stamp is not None:
            owners.setdefault(image.label.name, []).append(image.name)
    findings = []
    for name, image_names in owners.items():
        if len(image_names) > 1:
            shown = " and ".join(image_names[:2])
            message = f"used for {shown}; remove all but one of the images, or give each its own labels"
            findings.append(Finding(name, SHARED_LABEL, message))
    return findings
