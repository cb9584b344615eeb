"""Finds files with labels that are not read: in another format, or with another suffix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from data.image_io.file_kinds import is_image_name
from data.labels.findings import UNREAD_LABELS, Finding
from data.labels.other_formats import format_of_labels
from data.source.diagnosis.similar_names import loose_stem
from data.source.listing.candidate_files import Candidate, CandidateFiles
from data.source.listing.label_files import ListedImage


class UnreadLabels(NamedTuple):
    """A file that is not read and seems to have the labels of an image."""

    image: str  # name of the image
    finding: Finding


def unread_labels(
    images: Sequence[ListedImage], folders: Sequence[str], candidates: CandidateFiles, max_files: int
) -> list[UnreadLabels]:
    """Returns the files that have the names of ``images``, which are unlabeled, and seem to have labels, one for each
    image.

    ``folders``: where their label files are expected. ``max_files``: files per folder that are opened.
    """
    if not images:
        return []
    image_of_stem = {loose_stem(image.file.base_name): image for image in images}
    unread: dict[str, UnreadLabels] = {}
    for folder in folders:
        names = sorted(name for name in candidates.names(folder) if not is_image_name(name))
        stems = {name: _image_stem(name, candidates.label_format.suffix) for name in names}
        named_like_images = [name for name in names if stems[name] in image_of_stem]
        for name in named_like_images[:max_files]:
            image = image_of_stem[stems[name]]
            file = Candidate(folder, name)
            format_name = "" if image.name in unread else format_of_labels(file.first_bytes())
            if format_name:
                message = (
                    f"seems to have the labels of {image.name}, which is left out ({format_name}; labels are read from "
                    f"{image.expected_label}, which may be empty)"
                )
                finding = Finding(candidates.full_name(file), UNREAD_LABELS, message, lost_images=1)
                unread[image.name] = UnreadLabels(image.name, finding)
    return list(unread.values())


def _image_stem(name: str, label_suffix: str) -> str:
    """Returns the loose stem of the image to which ``00.json``, ``00.png.json``, ``00.txt.bak`` or ``00`` may belong.
    ``label_suffix``: that of label files that are read."""
    stem = loose_stem(name)
    begin, suffix = os.path.splitext(stem)
    return begin if suffix == label_suffix or is_image_name(stem) else stem
