"""Merges the names that symbolic links give an image into one, with the label file found under any of them.

If two names have different label files, the image is listed twice: as two views, each with its own labels. A file that
is empty or cannot be read makes no view if another one has labels. Files where the format expects them come first:
other files (`unusual_labels`) are looked for only if none of the names has one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data.labels.findings import SECOND_LABEL, SECOND_VIEW, Finding
from data.source.listing.listing import ImageStatus, ListedImage
from data.split_files import ImageFile
from utils.files.paths import path_of

# An image none of whose names has labels has the first of these statuses that any of the names has. If a label file
# cannot be read, an empty one beside it doesn't show that the image is a background.
_WITHOUT_LABELS = (ImageStatus.LEFT_OUT, ImageStatus.LABELED, ImageStatus.BACKGROUND)


def find_aliases(
    images: Mapping[str, ImageFile], real_folders: Mapping[str, str], root: Path
) -> dict[str, list[ImageFile]]:
    """Finds the images that have several names. Returns, by usual name, the image under its other names. The usual name
    is the first one without symbolic links, or else the first.

    Args:
        images: images by name.
        real_folders: real paths of the image folders, by the prefixes of the image names.
        root: the data set's folder.
    """
    names_of_folder: dict[str, list[str]] = {}
    for prefix, real_folder in real_folders.items():
        names_of_folder.setdefault(real_folder, []).append(prefix)
    same_images: dict[tuple[str, str], list[ImageFile]] = {}  # by real folder and base name
    for name in sorted(images):
        folder, separator, base_name = name.rpartition("/")
        real_folder = real_folders[folder + separator]
        if len(names_of_folder[real_folder]) > 1:
            same_images.setdefault((real_folder, base_name), []).append(images[name])
    real_root = os.path.realpath(root)
    aliases: dict[str, list[ImageFile]] = {}
    for (real_folder, _), names in same_images.items():
        if len(names) > 1:
            usual = next((name for name in names if _folder_of(name, real_root) == real_folder), names[0])
            aliases[usual.name] = [name for name in names if name is not usual]
    return aliases


def _folder_of(image: ImageFile, real_root: str) -> str:
    """Returns the path of an image's folder, from the image's name."""
    return path_of(image.name.rpartition("/")[0], real_root)


class Views(NamedTuple):
    """Holds an image, once for each file with its labels, and what is wrong with its label files."""

    images: list[ListedImage]
    findings: list[Finding]  # without a loss


def views_of_image(named_images: Sequence[ListedImage], root: Path) -> Views:
    """Returns an image once for each of its label files with labels, under the first name with which the label file is
    found, or once if it has none.

    ``named_images``: the image under each of its names, the usual one first, with the label file found under that name.
    """
    names_of_label: dict[str, list[ListedImage]] = {}  # by the real path of the label file
    for image in named_images:
        if image.status is not ImageStatus.BACKGROUND:
            label_path = os.path.realpath(path_of(image.label.name, root))
            names_of_label.setdefault(label_path, []).append(image)
    views = [names for names in names_of_label.values() if _has_labels(names[0])]
    if not views:
        views = [[min(named_images, key=lambda image: _WITHOUT_LABELS.index(image.status))]]
    used = {image.name for view in views for image in view}
    views[0] += [image for image in named_images if image.name not in used]

    first = views[0][0]
    unread = [names[0] for names in names_of_label.values() if used.isdisjoint(image.name for image in names)]
    findings = []
    if first.status is ImageStatus.LABELED:  # else its own finding says that it is left out
        message = f"has no labels that can be read; those in {first.label.name} are used"
        findings += [Finding(image.label.name, SECOND_LABEL, message) for image in unread]
    for view, *_ in views[1:]:
        message = f"{first.name}, which has {first.label.name}, is used a second time with these labels"
        findings.append(Finding(view.label.name, SECOND_VIEW, message))
    return Views([image._replace(aliases=tuple(alias.file for alias in others)) for image, *others in views], findings)


def _has_labels(image: ListedImage) -> bool:
    """Returns whether an image has a label file that is not empty."""
    return image.status is ImageStatus.LABELED and image.label.stamp is not None and image.label.stamp.size > 0
