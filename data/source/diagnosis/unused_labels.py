"""Diagnoses a split that does not have exactly one label file per image: label files used by no image or by several,
and files in other formats that seem to contain the labels of an image.

An unlabeled image to which such a file may belong is left out: as a background, it would teach the model to ignore its
objects. The steps:

1. find the unused label files, in the folders where they are expected (`_in_expected_folders`) and nearby
   (`_misplaced_files`);
2. explain files whose image is known (`_file_of_images`): the image has another label file, or is not read;
3. leave out the images whose names resemble the name of an unexplained file (`_assign_images_once`);
4. leave out the images that seem to have labels in another format (`unread_labels`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import OF_MISSING_FOLDER, ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.labels.image_names import ImageNames, loose, readings_of
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import OtherSplits, SplitContext
from data.source.diagnosis.unread_labels import unread_labels
from data.source.listing.candidate_files import Candidate
from data.source.listing.label_files import FoundLabels, ImageGroup
from data.source.listing.label_folders import NearbyFolder, expected_folders, nearby_folders
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of


class Diagnosis(NamedTuple):
    """The unused label files of a split, and the images that are left out because of them."""

    findings: list[Finding]
    reasons: dict[str, Finding]  # findings because of which images are left out, by image name


NO_DIAGNOSIS = Diagnosis([], {})  # for a split with exactly one label file per image


class _Unused(NamedTuple):
    """What is known about an unused label file."""

    explanation: Finding | None = None  # None if its image is unknown
    images: Sequence[ListedImage] = ()  # unlabeled images that the file names in its content


def diagnose_labels(found: FoundLabels, split_folders: Sequence[str], others: OtherSplits) -> Diagnosis:
    """Reports the label files that are not used by exactly one image of the split, and labels in other formats.

    Args:
        found: the label files that are used.
        split_folders: the folders that the split names (absolute), without lists.
        others: the data set's other splits.
    """
    context = SplitContext.of(found, split_folders, others)
    groups_by_folder = expected_folders(found)
    unused = dict(_in_expected_folders(groups_by_folder, context))
    unused |= dict.fromkeys(_misplaced_files(context, expected=groups_by_folder), _Unused())
    similar = {
        file: state.images or context.unlabeled.resembling(loose_stem(file.name))
        for file, state in unused.items()
        if state.explanation is None
    }
    images_of = _assign_images_once(similar)
    findings: list[Finding] = []
    reasons: dict[str, Finding] = {}
    for file, state in unused.items():
        finding = state.explanation
        if finding is None:
            finding = _of_unknown_image(file, similar[file], images_of[file], context)
            reasons |= dict.fromkeys(images_of[file], finding)
        findings.append(finding)
    findings += _shared_labels(found.images)

    unread = unread_labels(found, left_out=reasons)
    findings += dict.fromkeys(unread.values())  # images of one stem have the same finding
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


def _in_expected_folders(
    groups_by_folder: Mapping[str, Sequence[ImageGroup]], context: SplitContext
) -> Iterator[tuple[Candidate, _Unused]]:
    """Yields the unused label files in the folders where label files are expected."""
    candidates = context.candidates
    label_format = candidates.label_format
    for folder in _folders_to_search(groups_by_folder, context):
        image_folders = [group.folder for group in groups_by_folder[folder]]
        for file in candidates.files(folder):
            first_bytes = file.first_bytes()
            if not label_format.is_labels(first_bytes):
                continue
            named = label_format.named_image(first_bytes) if label_format.named_image is not None else ""
            stems = _stems_of_its_image(file, named)
            names = _closest(named, context.images_on_disk.find(stems, image_folders))
            state: _Unused | None = None
            if names:
                state = _file_of_images(names, file, context)
            elif candidates.annotations is None or context.others.stems.isdisjoint(stems):
                state = _Unused()
            if state is not None:
                yield file, state


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


def _stems_of_its_image(file: Candidate, named: str) -> list[str]:
    """Returns the loose stems that the image of a label file may have, beginning with the stem of the file itself.
    ``named``: the image that the file names, or ""."""
    stems = [loose_stem(file.name)]
    for parts in readings_of(named):
        stems += [loose(parts[-1]), loose_stem(parts[-1])]
    return stems


def _closest(named: str, images: list[str]) -> list[str]:
    """Returns those of several ``images`` whose folders a label file names, or all if it names none."""
    if len(images) <= 1 or not named:
        return images
    return [images[i] for i in ImageNames.of_single_names(images).find(named)] or images


def _file_of_images(names: Sequence[str], file: Candidate, context: SplitContext) -> _Unused | None:
    """Returns what is known about an unused label file of one of the existing images ``names``, or None if the file can
    be ignored."""
    images = [context.image_of_name[name] for name in names if name in context.image_of_name]
    images = list({image.name: image for image in images}.values())  # links may give one image several of the names
    unlabeled = [image for image in images if image.status is ImageStatus.BACKGROUND]
    labeled = [image for image in images if image.status is ImageStatus.LABELED]
    root = context.candidates.folders.root
    if any(context.candidates.have_equal_labels(file.path, path_of(image.label.name, root)) for image in labeled):
        return None  # a copy
    if unlabeled:
        return _Unused(images=unlabeled)
    if labeled:
        message = f"{labeled[0].name} uses {labeled[0].label.name} instead; remove one of the two"
        return _Unused(Finding(context.candidates.full_name(file), SECOND_LABEL, message))
    if images or os.path.splitext(names[0])[1].lower() in IMAGE_SUFFIXES:
        return None  # an image of a supported kind is in no list, or has a finding already
    return _Unused(_without_image(file, f"its image, {names[0]}, is not read", context))


# Nearby folders


def _misplaced_files(context: SplitContext, expected: Container[str]) -> list[Candidate]:
    """Returns the label files of a split that are in nearby folders. ``expected``: folders already searched."""
    candidates = context.candidates
    misplaced: dict[Candidate, None] = {}  # an ordered set: a folder may be near several folders of the split
    for nearby in nearby_folders(context.split_folders, candidates):
        folder = candidates.folders.first_name(nearby.label_folder)
        if folder in expected:
            continue
        for file in candidates.files(folder):
            is_new = file not in misplaced and _is_misplaced(file, nearby, context)
            if is_new and candidates.is_label_file(file):
                misplaced[file] = None
    return list(misplaced)


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


def _without_image(file: Candidate, message: str, context: SplitContext) -> Finding:
    """Returns the finding about a label file whose image the split does not have.

    It counts as one lost image. If the split names only lists, nothing is lost, because the folder may contain the
    labels of many other images.
    """
    candidates = context.candidates
    is_of_split = bool(context.split_folders)
    return Finding(
        where=candidates.full_name(file),
        kind=ORPHAN,
        text=message,
        lost_images=int(is_of_split),
        lost_objects=candidates.num_objects(file) if is_of_split else 0,
    )


def _of_unknown_image(
    file: Candidate, similar: Sequence[ListedImage], left_out: Collection[str], context: SplitContext
) -> Finding:
    """Returns the finding about a label file that may belong to any of the unlabeled images ``similar``.

    ``left_out``: names of the images that are left out because of it, and not already because of another file, if any
    image of the split is labeled.
    """
    if similar:
        first = similar[0]
        finding = Finding(
            where=context.candidates.full_name(file),
            kind=ORPHAN,
            text=f"belongs to no image; if it labels {first.name}, which is left out, rename it to {first.label.name}",
            lost_images=len(left_out) if context.found.is_any_labeled else 0,
            lost_objects=context.candidates.num_objects(file) if left_out else 0,
        )
    else:
        finding = _without_image(file, "belongs to no image; rename it like its image, or remove it", context)
    if not left_out and context.others.may_lack_images:
        return finding._replace(kind=OF_MISSING_FOLDER, lost_images=0, lost_objects=0)
    return finding


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
