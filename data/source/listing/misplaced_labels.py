"""Finds label files that are in the wrong folder: in one below or above those of their split."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from data.source.listing.candidate_files import Candidate, CandidateFiles
from data.source.listing.similar_names import loose_stem
from data.source.listing.surroundings import Surroundings


class _NearbyFolder(NamedTuple):
    """A folder in which label files of the split may be by mistake."""

    label_folder: str  # absolute
    image_folder: str  # absolute; its images have their labels in ``label_folder``
    is_shared: bool  # other splits may have labels there, too


def misplaced_labels(surroundings: Surroundings, searched: Container[str]) -> Iterator[Candidate]:
    """Yields the label files of a split in folders below and above its own, each once, but for folders that have been
    ``searched`` already."""
    candidates = surroundings.candidates
    yielded: set[Candidate] = set()  # a folder may be near several folders of the split
    for nearby in _nearby_folders(surroundings):
        if nearby.label_folder in searched:
            continue
        for file in candidates.files(nearby.label_folder):
            is_new = file not in yielded and _is_misplaced(file, nearby, surroundings)
            if is_new and candidates.is_label_file(file):
                yielded.add(file)
                yield file


def _is_misplaced(file: Candidate, nearby: _NearbyFolder, surroundings: Surroundings) -> bool:
    """Returns whether a file in a nearby folder belongs to no image there, and may belong to one of this split."""
    stem = loose_stem(file.name)
    if stem in surroundings.images_on_disk.names_in(nearby.image_folder) or stem in surroundings.labeled_stems:
        return False
    if stem in surroundings.unlabeled or not nearby.is_shared:
        return True
    return surroundings.others.is_first_split and stem not in surroundings.others.stems


def _nearby_folders(surroundings: Surroundings) -> Iterator[_NearbyFolder]:
    candidates = surroundings.candidates
    for split_folder in surroundings.split_folders:
        yield from _folders_below(split_folder, candidates)
        if candidates.annotations is None:
            yield from _folders_above(split_folder, candidates)


def _folders_below(split_folder: str, candidates: CandidateFiles) -> Iterator[_NearbyFolder]:
    """Yields the label folder of a folder that the split names, and the folders below."""
    is_shared = candidates.annotations is not None
    label_folder = candidates.label_folders(split_folder)[0]
    if label_folder == split_folder:
        prefix = os.path.join(split_folder, "")
        for folder in sorted(candidates.walked):
            if folder == split_folder or folder.startswith(prefix):
                yield _NearbyFolder(folder, folder, is_shared)
        return
    pending = [_NearbyFolder(label_folder, split_folder, is_shared)]
    while pending:
        nearby = pending.pop()
        yield nearby
        for name in candidates.folders_in(nearby.label_folder):
            inner_labels = os.path.join(nearby.label_folder, name)
            inner_images = os.path.join(nearby.image_folder, name)
            pending.append(_NearbyFolder(inner_labels, inner_images, is_shared))


def _folders_above(split_folder: str, candidates: CandidateFiles) -> Iterator[_NearbyFolder]:
    """Yields the label folders of the folders above one that the split names, up to ``images``."""
    image_folder = split_folder
    while os.path.basename(image_folder) != "images":
        image_folder = os.path.dirname(image_folder)
        label_folder = candidates.label_folders(image_folder)[0]
        if label_folder == image_folder or Path(image_folder) in candidates.folders.root.parents:
            return
        yield _NearbyFolder(label_folder, image_folder, is_shared=True)
