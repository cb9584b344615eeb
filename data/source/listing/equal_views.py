"""Finds images that symbolic links show under several names, so that each is listed once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.source.listing.label_files import ListedImage
from utils.files.paths import path_of


def without_equal_views(
    images: Sequence[ListedImage], views: Mapping[str, Sequence[str]], root: Path, *, share_labels: bool
) -> list[ListedImage]:
    """Returns ``images`` without those that symbolic links show under another name as well.

    Args:
        views: see `SplitImages`.
        root: the data set's folder.
        share_labels: one label file has the labels of all images. Else each view may have a label file of its own.
    """
    dropped: set[ListedImage] = set()
    for real_folder, equal_images in _equal_images(images, views):
        kept = [] if share_labels else _views_with_own_labels(equal_images, root)
        if not kept:
            kept = [_usual_view(equal_images, real_folder, root)]
        dropped.update(equal_images)
        dropped.difference_update(kept)
    return [image for image in images if image not in dropped]


def _equal_images(
    images: Sequence[ListedImage], views: Mapping[str, Sequence[str]]
) -> list[tuple[str, list[ListedImage]]]:
    """Returns the images in folders that have several names: the real path of the folder, and all views of an image,
    by image."""
    real_folder_of = {prefix: real for real, prefixes in views.items() if len(prefixes) > 1 for prefix in prefixes}
    if not real_folder_of:
        return []
    views_of_image: dict[tuple[str, str], list[ListedImage]] = {}
    for image in images:
        folder, separator, base = image.name.rpartition("/")
        real_folder = real_folder_of.get(folder + separator)
        if real_folder:
            views_of_image.setdefault((real_folder, base), []).append(image)
    return [(real_folder, equal) for (real_folder, _), equal in views_of_image.items()]


def _views_with_own_labels(equal_images: Sequence[ListedImage], root: Path) -> list[ListedImage]:
    """Returns the views of one image that have label files of their own; if some of these cannot be read and no other
    view has any, one of them, as the image is no background."""
    by_label_file: dict[str, ListedImage] = {}  # by real path
    unreadable = []
    for image in equal_images:
        if image.label is None:
            unreadable.append(image)
        elif image.label.stamp is not None:
            by_label_file.setdefault(os.path.realpath(path_of(image.label.name, root)), image)
    return list(by_label_file.values()) or unreadable[:1]


def _usual_view(equal_images: Sequence[ListedImage], real_folder: str, root: Path) -> ListedImage:
    """Returns the view of an image that no symbolic link is part of, as a label file is likely to name it; else the
    first."""
    real_root = os.path.realpath(root)
    for image in equal_images:
        folder = image.name.rpartition("/")[0]
        if os.path.normpath(os.path.join(real_root, folder)) == real_folder:
            return image
    return equal_images[0]
