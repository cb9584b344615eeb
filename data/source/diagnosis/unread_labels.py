"""Finds files with labels that are not read because of their format or suffix."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence

from data.images.kinds import IMAGE_SUFFIXES, UNREAD_SUFFIXES, is_image
from data.labels.findings import UNREAD_LABELS, Finding
from data.labels.recognize_labels import format_of_labels
from data.source.diagnosis.similar_names import loose_stem
from data.source.listing.candidate_files import SAMPLE_SIZE, CandidateFile
from data.source.listing.found_labels import FoundLabels
from data.source.listing.listing import ImageStatus, ListedImage


def unread_labels(found: FoundLabels, left_out: Container[str]) -> dict[str, Finding]:
    """Returns, by image name, findings about files that seem to contain the labels of an unlabeled image. Images that
    are ``left_out`` already are skipped."""
    unlabeled = {
        file.name: image
        for image in found.images
        if image.status is ImageStatus.BACKGROUND and image.name not in left_out
        for file in image.files
    }
    findings: dict[str, Finding] = {}
    for group in found.groups:
        images = [unlabeled[name] for name in group.names if name in unlabeled]
        images = [image for image in images if image.name not in findings]  # skip images found under another name
        folders = list(dict.fromkeys((group.usual_label_folder, group.folder)))
        findings |= _unread_labels_in(folders, images, found)
    return findings


def _unread_labels_in(folders: Sequence[str], images: Sequence[ListedImage], found: FoundLabels) -> dict[str, Finding]:
    """Returns, by image name, findings about files in ``folders`` that are named like the unlabeled ``images`` and seem
    to contain labels, at most one per image. Images of one stem share a finding."""
    if not images:
        return {}
    candidates = found.candidates
    # Number of files to open per folder. A sample suffices if no image is labeled: then the split is refused.
    max_files = len(found.images) if found.is_any_labeled else SAMPLE_SIZE
    images_of_stem: dict[str, list[ListedImage]] = {}
    for image in images:
        images_of_stem.setdefault(loose_stem(image.file.base_name), []).append(image)
    findings: dict[str, Finding] = {}
    for folder in folders:
        names = sorted(
            name for name in candidates.names(folder) if not is_image(name, IMAGE_SUFFIXES | UNREAD_SUFFIXES)
        )
        stems = {name: _image_stem(name, candidates.label_format.suffix) for name in names}
        named_like_images = [name for name in names if stems[name] in images_of_stem]
        for name in named_like_images[:max_files]:
            same_stem = images_of_stem[stems[name]]
            if same_stem[0].name in findings:
                continue
            file = CandidateFile(folder, name)
            format_name = format_of_labels(file.first_bytes())
            if format_name:
                finding = _unread_file(file, same_stem, format_name, found)
                findings |= {image.name: finding for image in same_stem}
    return findings


def _unread_file(file: CandidateFile, images: Sequence[ListedImage], format_name: str, found: FoundLabels) -> Finding:
    """Returns the finding about a file that seems to contain the labels of one of ``images``, which have one stem."""
    names = " or ".join(image.name for image in images)
    left_out = ""
    if found.is_any_labeled:
        left_out = ", which is left out" if len(images) == 1 else ", which are left out"
    return Finding(
        where=found.candidates.full_name(file),
        kind=UNREAD_LABELS,
        text=(
            f"seems to contain the labels of {names}{left_out} ({format_name}; labels are read from "
            f"{images[0].label.name}, which may be empty)"
        ),
        lost_images=len(images) if found.is_any_labeled else 0,
    )


def _image_stem(name: str, label_suffix: str) -> str:
    """Returns the loose stem of the image to which ``00.json``, ``00.png.json``, ``00.txt.bak`` or ``00`` may belong.
    ``label_suffix``: suffix of the label files that are read."""
    stem = loose_stem(name)
    begin, suffix = os.path.splitext(stem)
    return begin if suffix == label_suffix or is_image(stem, IMAGE_SUFFIXES | UNREAD_SUFFIXES) else stem
