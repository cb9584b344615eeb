"""Finds files with labels that are not read: in another format, or with another suffix."""

from __future__ import annotations

import os

from data.image_io.file_kinds import is_image_name
from data.labels.findings import UNREAD_LABELS, Finding
from data.labels.other_formats import format_of_labels
from data.source.listing.candidate_files import Candidate, CandidateFiles
from data.source.listing.label_files import ImageGroup, ListedImage
from data.source.listing.similar_names import loose_stem


def unread_labels(
    group: ImageGroup, candidates: CandidateFiles, doubtful: set[ListedImage], max_files: int
) -> list[Finding]:
    """Returns findings about files that have the names of unlabeled images and seem to have labels, one for each image.

    ``doubtful``: images that are left out for another reason, to which those of these findings are added.
    ``max_files``: files per folder that are opened.
    """
    unlabeled = {  # by loose stem
        loose_stem(image.base_name): image
        for image in group.without_usual_label
        if image.is_unlabeled and image not in doubtful
    }
    if not unlabeled:
        return []
    findings = []
    for folder in dict.fromkeys((group.usual_label_folder, group.folder)):
        names = sorted(name for name in candidates.unused_names(folder) if not is_image_name(name))
        stems = {name: _image_stem(name, candidates.label_format.suffix) for name in names}
        named_like_images = [name for name in names if stems[name] in unlabeled]
        for name in named_like_images[:max_files]:
            file = Candidate(folder, name)
            image = unlabeled[stems[name]]
            format_name = format_of_labels(file.first_bytes()) if image not in doubtful else ""
            if format_name:
                doubtful.add(image)
                message = (
                    f"seems to have the labels of {image.name}, which is left out ({format_name}; labels are read from "
                    f"{image.expected_label}, which may be empty)"
                )
                findings.append(Finding(candidates.full_name(file), UNREAD_LABELS, message, lost_images=1))
    return findings


def _image_stem(name: str, label_suffix: str) -> str:
    """Returns the loose stem of the image to which ``00.json``, ``00.png.json``, ``00.txt.bak`` or ``00`` may belong.
    ``label_suffix``: that of label files that are read."""
    stem = loose_stem(name)
    begin, suffix = os.path.splitext(stem)
    return begin if suffix == label_suffix or is_image_name(stem) else stem
