"""Finds images that symbolic links show under several names, so that each is listed once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of


def real_folders(aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the real paths of the folders that have several names, by the prefixes of the names of their images."""
    return {prefix: real for real, prefixes in aliases.items() if len(prefixes) > 1 for prefix in prefixes}


def mark_aliases(
    images: list[ListedImage], aliases: Mapping[str, Sequence[str]], root: Path, *, share_labels: bool
) -> list[ListedImage]:
    """Returns ``images``, of which those that symbolic links show under another name as well are aliases.

    Args:
        aliases: see `SplitImages`.
        root: the data set's folder.
        share_labels: one label file has the labels of all images. Else each alias may have a label file of its own.
    """
    aliased: set[str] = set()
    for real_folder, same_images in _images_with_aliases(images, aliases):
        kept = [] if share_labels else _aliases_with_own_labels(same_images, root)
        if not kept:
            kept = [_usual_alias(same_images, real_folder, root)]
        aliased.update(image.name for image in same_images)
        aliased.difference_update(image.name for image in kept)
    if not aliased:
        return images
    return [image.as_alias() if image.name in aliased else image for image in images]


def _images_with_aliases(
    images: Sequence[ListedImage], aliases: Mapping[str, Sequence[str]]
) -> list[tuple[str, list[ListedImage]]]:
    """Returns the images in folders that have several names: the real path of the folder, and an image under all of its
    names, by image."""
    real_folder_of = real_folders(aliases)
    if not real_folder_of:
        return []
    aliases_of_image: dict[tuple[str, str], list[ListedImage]] = {}
    for image in images:
        folder, separator, base = image.name.rpartition("/")
        real_folder = real_folder_of.get(folder + separator)
        if real_folder and image.status is not ImageStatus.ALIAS:
            aliases_of_image.setdefault((real_folder, base), []).append(image)
    return [(real_folder, same_images) for (real_folder, _), same_images in aliases_of_image.items()]


def _aliases_with_own_labels(same_images: Sequence[ListedImage], root: Path) -> list[ListedImage]:
    """Returns the aliases of one image that have label files of their own, also those that are left out because of such
    a file."""
    by_label_file: dict[str, ListedImage] = {}  # by real path
    for image in same_images:
        if image.status is ImageStatus.LABELED:
            by_label_file.setdefault(os.path.realpath(path_of(image.label.name, root)), image)
        elif image.reason is not None:
            by_label_file.setdefault(os.path.realpath(path_of(image.reason.where, root)), image)
    return list(by_label_file.values())


def _usual_alias(same_images: Sequence[ListedImage], real_folder: str, root: Path) -> ListedImage:
    """Returns the alias of an image that no symbolic link is part of, as a label file is likely to name it; else the
    first."""
    real_root = os.path.realpath(root)
    for image in same_images:
        folder = image.name.rpartition("/")[0]
        if os.path.normpath(os.path.join(real_root, folder)) == real_folder:
            return image
    return same_images[0]
