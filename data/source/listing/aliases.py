"""Lists an image once that symbolic links show under several names, with the label file that it has under any of them.

Two label files under two names make two images of it: two views of the same pictures, each with labels of its own.
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
    """Finds the images that have several names. Returns the other names of each by its usual one, which no symbolic
    link is part of, or else the first.

    Args:
        images: by name.
        real_folders: real paths of the folders of all images, by the prefixes of their names.
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
    """Returns the path of the folder of an image, by its name."""
    return path_of(image.name.rpartition("/")[0], real_root)


def one_per_label_file(names: Sequence[ListedImage], root: Path) -> list[ListedImage]:
    """Returns an image once for each of its label files, under the first name by which that is found; once, under the
    usual name, if it has none.

    ``names``: the image under each of its names, the usual one first, with the label file that it has under this name.
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
