"""Finds label files that are in the wrong folder: in one below or above those of their split."""

from __future__ import annotations

from collections.abc import Container, Iterator

from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.surroundings import Surroundings
from data.source.listing.candidate_files import Candidate
from data.source.listing.label_folders import NearbyFolder, nearby_folders


def misplaced_labels(surroundings: Surroundings, searched: Container[str]) -> Iterator[Candidate]:
    """Yields the label files of a split in folders below and above its own, each once, but for folders that have been
    ``searched`` already."""
    candidates = surroundings.candidates
    yielded: set[Candidate] = set()  # a folder may be near several folders of the split
    for nearby in nearby_folders(surroundings.split_folders, candidates):
        if nearby.label_folder in searched:
            continue
        for file in candidates.files(nearby.label_folder):
            is_new = file not in yielded and _is_misplaced(file, nearby, surroundings)
            if is_new and candidates.is_label_file(file):
                yielded.add(file)
                yield file


def _is_misplaced(file: Candidate, nearby: NearbyFolder, surroundings: Surroundings) -> bool:
    """Returns whether a file in a nearby folder belongs to no image there, and may belong to one of this split."""
    stem = loose_stem(file.name)
    if stem in surroundings.images_on_disk.names_in(nearby.image_folder) or stem in surroundings.labeled_stems:
        return False
    if stem in surroundings.unlabeled or not nearby.is_shared:
        return True
    return surroundings.others.is_first_split and stem not in surroundings.others.stems
