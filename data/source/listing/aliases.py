"""Merges the names that symbolic links give an image into one, with the label file found under any of them.

If two names have different label files, the image is listed twice: as two views, each with its own labels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.source.listing.listing import ImageStatus, ListedImage
from data.split_files import ImageFile
from utils.files.paths import path_of


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
        without_links = [name for name in names if _folder_of(name, real_root) == real_folder]
        usual = without_links[0] if without_links else names[0]
        if len(names) > 1:
            aliases[usual.name] = [name for name in names if name is not usual]
    return aliases


def _folder_of(image: ImageFile, real_root: str) -> str:
    """Returns the path of an image's folder, from the image's name."""
    return path_of(image.name.rpartition("/")[0], real_root)


def one_per_label_file(names: Sequence[ListedImage], root: Path) -> list[ListedImage]:
    """Returns an image once for each of its label files, under the first name with which the label file is found, or
    once under its usual name if it has no label file.

    ``names``: the image under each of its names, the usual one first, with the label file found under that name.
    """
    names_of_label: dict[str, list[ListedImage]] = {}  # by the real path of the label file
    unlabeled: list[ListedImage] = []
    for image in names:
        if image.status is ImageStatus.BACKGROUND:
            unlabeled.append(image)
        else:
            label_path = os.path.realpath(path_of(image.label.name, root))
            names_of_label.setdefault(label_path, []).append(image)
    views = list(names_of_label.values()) or [[]]
    views[0] += unlabeled
    return [image._replace(aliases=tuple(alias.file for alias in others)) for image, *others in views]
