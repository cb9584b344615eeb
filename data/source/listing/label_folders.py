"""Names the folders that may contain the label files of a split:

usual      the folder where the format first looks for the label files of an image folder
expected   the usual folder, the image folder and, if an image has no label file in the usual folder, the format's other
           folders
nearby     another folder where label files of the split may be misplaced: in the annotations if the data set names
           some, else below or above a usual one
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.found_labels import FoundLabels, ImageGroup
from data.source.listing.listing import ImageStatus


class NearbyFolder(NamedTuple):
    """A folder that may contain misplaced label files of the split."""

    label_folder: str  # absolute
    image_folders: list[str]  # folders (absolute) whose images may have label files in ``label_folder``


def are_all_labeled(found: FoundLabels, split_folders: Sequence[str]) -> bool:
    """Returns whether each image has its own label file in the usual folder, and no expected or nearby folder contains
    any other. ``split_folders``: folders that the split names (absolute)."""
    if found.without_usual_label:
        return False
    labels = {image.label.name for image in found.images if image.status is ImageStatus.LABELED}
    if len(labels) < len(found.images):
        return False
    expected = [folder for group in found.groups for folder in (group.usual_label_folder, group.folder)]
    nearby = [folder.label_folder for folder in nearby_folders(split_folders, found.candidates)]
    return not any(found.candidates.files(folder) for folder in dict.fromkeys((*expected, *nearby)))


def expected_folders(found: FoundLabels) -> dict[str, list[ImageGroup]]:
    """Returns the expected folders, each under one name, with the groups of images whose label files may be there,
    whether or not these have them elsewhere."""
    first_name = found.candidates.folders.first_name
    groups: dict[str, list[ImageGroup]] = {
        first_name(folder): [] for group in found.groups for folder in _expected_by(group, found)
    }
    for group in found.groups:
        for folder in dict.fromkeys(map(first_name, (group.folder, *group.label_folders))):
            if folder in groups:
                groups[folder].append(group)
    return groups


def _expected_by(group: ImageGroup, found: FoundLabels) -> list[str]:
    """Returns the expected folders of a group: all of its label folders if one of its images has no label file in the
    usual folder."""
    if found.without_usual_label.isdisjoint(group.names):
        return [group.usual_label_folder, group.folder]
    return group.label_folders


def nearby_folders(split_folders: Sequence[str], candidates: CandidateFiles) -> Iterator[NearbyFolder]:
    """Yields the annotations of a split and the folders below them or, without annotations, the usual label folders of
    the folders that it names, and the folders below and above these."""
    if candidates.annotations is not None:
        yield from _folders_of_annotations(str(candidates.annotations), candidates)
        return
    for split_folder in split_folders:
        yield from _folders_below(split_folder, candidates)
        yield from _folders_above(split_folder, candidates)


def label_folders_near(split_folder: str, candidates: CandidateFiles) -> Iterator[str]:
    """Yields the usual label folder of a folder that any split names, and the folders below and above it."""
    yield from _with_folders_below(candidates.label_folders(split_folder)[0], candidates)
    for nearby in _folders_above(split_folder, candidates):
        yield nearby.label_folder


def _folders_of_annotations(annotations: str, candidates: CandidateFiles) -> Iterator[NearbyFolder]:
    """Yields the annotations and the folders below them."""
    image_folders: dict[str, list[str]] = {}
    for image_folder in candidates.walked:
        for label_folder in candidates.label_folders(image_folder):
            image_folders.setdefault(label_folder, []).append(image_folder)
    for folder in _with_folders_below(annotations, candidates):
        yield NearbyFolder(folder, image_folders.get(folder, []))


def _folders_below(split_folder: str, candidates: CandidateFiles) -> Iterator[NearbyFolder]:
    """Yields the usual label folder of a folder that the split names, and the folders below it. For ``images/train``,
    these are ``labels/train``, ``labels/train/a``, ... If the labels are next to the images, as for a path without
    ``images``, these are the image folders themselves."""
    outer = candidates.label_folders(split_folder)[0]
    if outer == split_folder:
        prefix = os.path.join(split_folder, "")
        for folder in sorted(candidates.walked):
            if folder == split_folder or folder.startswith(prefix):
                yield NearbyFolder(folder, [folder])
    else:
        for folder in _with_folders_below(outer, candidates):
            yield NearbyFolder(folder, [os.path.normpath(os.path.join(split_folder, os.path.relpath(folder, outer)))])


def _with_folders_below(folder: str, candidates: CandidateFiles) -> Iterator[str]:
    """Yields a label folder and the folders below it."""
    pending = [folder]
    while pending:
        outer = pending.pop()
        yield outer
        pending += [os.path.join(outer, name) for name in candidates.folders_in(outer)]


def _folders_above(split_folder: str, candidates: CandidateFiles) -> Iterator[NearbyFolder]:
    """Yields the usual label folders of the folders above one that the split names, up to ``images``. For
    ``images/2024/train``, these are ``labels/2024`` and ``labels``."""
    image_folder = split_folder
    while os.path.basename(image_folder) != "images":
        image_folder = os.path.dirname(image_folder)
        label_folder = candidates.label_folders(image_folder)[0]
        if label_folder == image_folder or Path(image_folder) in candidates.folders.root.parents:
            return
        yield NearbyFolder(label_folder, [image_folder])
