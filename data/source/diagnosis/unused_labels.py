"""Diagnoses a split that does not have exactly one label file per image: label files used by no image or by several,
and files in other formats that seem to contain the labels of an image.

An unlabeled image to which such a file may belong is left out: as a background, it would teach the model to ignore its
objects. The steps:

1. collect the unused label files, in the folders where they are expected (`_collect_expected`) and nearby
   (`_collect_misplaced`);
2. explain files whose image is known (`_collect_file_of`): the image has another label file, or is not read;
3. leave out the images whose names resemble the name of an unexplained file (`_assign_images_once`);
4. leave out the images that seem to have labels in another format (`unread_labels`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import OF_MISSING_FOLDER, ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.labels.image_names import loose
from data.labels.label_format import FilesPerImage
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import OtherSplits, SplitContext
from data.source.diagnosis.unread_labels import unread_labels
from data.source.listing.candidate_files import Candidate, have_equal_content
from data.source.listing.label_files import FoundLabels, ImageGroup
from data.source.listing.label_folders import NearbyFolder, expected_folders, nearby_folders
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of


class Diagnosis(NamedTuple):
    """The unused label files of a split, and the images that are left out because of them."""

    findings: list[Finding]
    reasons: dict[str, Finding]  # findings because of which images are left out, by image name


NO_DIAGNOSIS = Diagnosis([], {})  # for a split with exactly one label file per image
_UnusedFiles = dict[Candidate, Finding | None]  # unused label files; None if the image is unknown


def diagnose_labels(found: FoundLabels, split_folders: Sequence[str], others: OtherSplits) -> Diagnosis:
    """Reports the label files that are not used by exactly one image of the split, and labels in other formats.

    Args:
        found: the label files that are used.
        split_folders: the folders that the split names (absolute), without lists.
        others: the data set's other splits.
    """
    context = SplitContext.of(found, split_folders, others)
    groups_by_folder = expected_folders(found)
    unused: _UnusedFiles = {}
    _collect_expected(unused, groups_by_folder, context)
    _collect_misplaced(unused, context, expected=groups_by_folder)

    unexplained = [file for file, explanation in unused.items() if explanation is None]
    similar = {file: context.unlabeled.resembling(loose_stem(file.name)) for file in unexplained}
    images_of = _assign_images_once(similar)
    findings: list[Finding] = []
    reasons: dict[str, Finding] = {}
    for file, explanation in unused.items():
        finding = explanation or _orphan(file, _orphan_message(similar[file]), context, images_of[file])
        if explanation is None and not images_of[file] and others.may_lack_images:
            finding = finding._replace(kind=OF_MISSING_FOLDER, lost_images=0, lost_objects=0)
        findings.append(finding)
        if explanation is None:
            reasons |= dict.fromkeys(images_of[file], finding)
    findings += _shared_labels(found.images)

    unread = unread_labels(found, left_out=reasons)
    findings += unread.values()
    return Diagnosis(findings, reasons | unread if found.is_any_labeled else {})


def _assign_images_once(similar: Mapping[Candidate, Sequence[ListedImage]]) -> dict[Candidate, list[str]]:
    """Returns the names of the images that each file resembles. An image is assigned to its first file only, so that it
    is counted as lost once."""
    assigned: set[str] = set()
    images_of: dict[Candidate, list[str]] = {}
    for file, images in similar.items():
        images_of[file] = [image.name for image in images if image.name not in assigned]
        assigned.update(images_of[file])
    return images_of


# Expected folders (see `label_folders`)


def _collect_expected(
    unused: _UnusedFiles, groups_by_folder: Mapping[str, Sequence[ImageGroup]], context: SplitContext
) -> None:
    """Adds the unused label files in the folders where label files are expected."""
    candidates = context.candidates
    for folder in _folders_to_search(groups_by_folder, context):
        image_folders = [group.folder for group in groups_by_folder[folder]]
        for file in candidates.files(folder):
            first_bytes = file.first_bytes()
            if not candidates.label_format.is_labels(first_bytes):
                continue
            stems = _stems_of_its_image(file, first_bytes, candidates.label_format)
            image = context.images_on_disk.find(stems, image_folders)
            if image:
                _collect_file_of(unused, image, file, context)
            elif candidates.annotations is None or context.others.stems.isdisjoint(stems):
                unused[file] = None


def _folders_to_search(groups_by_folder: Mapping[str, Sequence[ImageGroup]], context: SplitContext) -> Iterator[str]:
    """Yields the expected folders whose unused files are reported by this split."""
    candidates = context.candidates
    for folder, groups in groups_by_folder.items():
        is_usual = any(folder == candidates.folders.first_name(group.usual_label_folder) for group in groups)
        if not is_usual and not candidates.contains_labels(folder):
            continue
        if candidates.files(folder) and any(_is_reported_here(group, context) for group in groups):
            yield folder


def _is_reported_here(group: ImageGroup, context: SplitContext) -> bool:
    """Returns whether this split reports the unused label files of an image folder. If several splits list images of
    one folder, the first split does, because these files would be a large fraction of a small split."""
    is_walked = group.folder in context.candidates.walked
    return is_walked or group.folder not in context.others.folders_before


def _stems_of_its_image(file: Candidate, first_bytes: bytes, label_format: FilesPerImage) -> list[str]:
    """Returns the loose stems that the image of a label file may have, beginning with the stem of the file itself."""
    stems = [loose_stem(file.name)]
    image = label_format.named_image(first_bytes) if label_format.named_image is not None else ""
    if image:
        stems += [loose(image), loose_stem(image)]
    return stems


def _collect_file_of(unused: _UnusedFiles, name: str, file: Candidate, context: SplitContext) -> None:
    """Adds an unused label file of the existing image ``name``, unless the file can be ignored."""
    image = context.image_of_name.get(name)
    if image is None:
        is_read = os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
        if not is_read:  # an image of a supported kind is in no list, or has a finding already
            unused[file] = _orphan(file, f"its image, {name}, is not read", context)
    elif image.status is ImageStatus.BACKGROUND:
        unused[file] = None
    elif image.status is ImageStatus.LABELED:
        used = image.label.name
        if not have_equal_content(file.path, path_of(used, context.candidates.folders.root)):
            message = f"{name} uses {used} instead; remove one of the two"
            unused[file] = Finding(context.candidates.full_name(file), SECOND_LABEL, message)
    else:
        assert image.status is ImageStatus.LEFT_OUT  # its reason names the bad file


# Nearby folders


def _collect_misplaced(unused: _UnusedFiles, context: SplitContext, expected: Container[str]) -> None:
    """Adds the label files of a split that are in nearby folders. ``expected``: folders already searched."""
    candidates = context.candidates
    for nearby in nearby_folders(context.split_folders, candidates):
        folder = candidates.folders.first_name(nearby.label_folder)
        if folder in expected:
            continue
        for file in candidates.files(folder):  # a folder may be near several folders of the split
            is_new = file not in unused and _is_misplaced(file, nearby, context)
            if is_new and candidates.is_label_file(file):
                unused[file] = None


def _is_misplaced(file: Candidate, nearby: NearbyFolder, context: SplitContext) -> bool:
    """Returns whether a file in a nearby folder belongs to no image there and may belong to an image of this split.
    Files that may belong to an image of any split are reported by the first split."""
    stem = loose_stem(file.name)
    belongs_to_another = stem in context.images_on_disk.names_in(nearby.image_folder) or stem in context.labeled_stems
    if belongs_to_another:
        return False
    if stem in context.unlabeled:
        return True
    if nearby.is_of_other_splits:
        return context.others.is_first_split and stem not in context.others.stems
    return True


# Findings


def _orphan_message(similar: Sequence[ListedImage]) -> str:
    """Returns what to do with a label file that belongs to no image. ``similar``: the unlabeled images with similar
    names, which are left out."""
    if not similar:
        return "belongs to no image; rename it like its image, or remove it"
    first = similar[0]
    return f"belongs to no image; if it labels {first.name}, which is left out, rename it to {first.label.name}"


def _orphan(file: Candidate, message: str, context: SplitContext, images: Collection[str] = ()) -> Finding:
    """Returns the finding about a label file that belongs to no image. ``images``: names of the images that it
    resembles, which are left out if any image of the split is labeled.

    Without ``images``, the file counts as one lost image, unless the split names only lists: then the folder may
    contain the labels of many other images.
    """
    candidates = context.candidates
    lost_images = int(bool(context.split_folders))
    if images:
        lost_images = len(images) if context.found.is_any_labeled else 0
    is_of_split = bool(images or context.split_folders)
    return Finding(
        where=candidates.full_name(file),
        kind=ORPHAN,
        text=message,
        lost_images=lost_images,
        lost_objects=candidates.label_format.num_objects(file.content()) if is_of_split else 0,
    )


def _shared_labels(images: Sequence[ListedImage]) -> list[Finding]:
    """Returns findings about the label files that several images share."""
    owners: dict[str, list[str]] = {}  # names of images, by label file
    for image in images:
        if image.status is ImageStatus.LABELED:
            owners.setdefault(image.label.name, []).append(image.name)
    findings = []
    for name, image_names in owners.items():
        if len(image_names) > 1:
            shown = " and ".join(image_names[:2])
            message = f"used for {shown}; remove all but one of the images, or give each its own labels"
            findings.append(Finding(name, SHARED_LABEL, message))
    return findings
