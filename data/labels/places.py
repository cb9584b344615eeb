"""Decides in which folder the label files of images are (rule D1), in formats with a file per image.

The places of an image's label file follow from the image's path as written; links are not resolved. With the stem of
the image and the suffix of the format, it is

- in the folder in which the last ``images`` of the path is ``labels``, or beside the image;
- if the data set names a folder of ``annotations``, at the same path below it, without the folders up to the last
  ``images`` (or ``JPEGImages``) or up to the folder that the split names; or else directly in it: ``train/p/x.xml``,
  ``p/x.xml`` or ``x.xml`` for ``images/train/p/x.png``.

Where several places have label files, the one that has them for all images counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from data.folders import Folders
from utils.errors import UserError
from utils.files.paths import casefold_nfc
from utils.logger import get_logger

Key = TypeVar("Key")
_IMAGE_TREES = ("images", "jpegimages")


def yolo_places(image_folder: str, folders: Folders, *, is_bounded: bool) -> list[str]:
    """Returns the folders in which YOLO's label files of the images in ``image_folder`` may be; the first need not
    exist. ``is_bounded``: whether a folder outside the data set's own is none."""
    parts = Path(image_folder).parts
    for i in reversed(range(_first_part(image_folder, folders.root) if is_bounded else 1, len(parts))):
        if casefold_nfc(parts[i]) == "images":
            above = os.path.join(*parts[:i])
            below = ["labels", *parts[i + 1 :]]
            return [folders.find_below(above, below) or os.path.join(above, *below), image_folder]
    return [image_folder]


def voc_places(image_folder: str, annotations: str, entry: str, folders: Folders) -> list[str]:
    """Returns the existing folders below ``annotations`` in which the label files of the images in ``image_folder`` may
    be, or ``annotations`` itself. ``entry``: the folder, or the data set's own for a list, that the split names."""
    tree = image_tree(image_folder, folders.root)
    tops = [tree or str(folders.root), entry, image_folder]
    below = [Path(image_folder).relative_to(top).parts for top in tops if Path(image_folder).is_relative_to(top)]
    places = [folders.find_below(annotations, list(parts)) for parts in below]
    return list(dict.fromkeys(place for place in places if place and os.path.isdir(place))) or [annotations]


def image_tree(image_folder: str, root: Path) -> str:
    """Returns the last folder ``images`` or ``JPEGImages`` of a path, or "" if there is none; in the data set's folder
    ``root``, only those below it count."""
    parts = Path(image_folder).parts
    for end in range(len(parts), _first_part(image_folder, root), -1):
        if casefold_nfc(parts[end - 1]) in _IMAGE_TREES:
            return os.path.join(*parts[:end])
    return ""


def _first_part(path: str, root: Path) -> int:
    """Returns how many parts a path shares with the data set's folder: all of its own, or only the first."""
    return len(root.parts) if Path(path).is_relative_to(root) else 1


def complete_place(labeled: Mapping[Key, tuple[int, int]], show: Callable[[Key], str] = str) -> Key:
    """Returns the place that counts: the first that has a label file for each image, else the only one that has any,
    and logs the places that do not count.

    ``labeled``: by place, the number of images with a label file there, and of all images; some place has one. Raises
    UserError with these numbers if several places have some, and none has all.
    """
    some = [place for place, (count, _) in labeled.items() if count]
    numbers = {place: "{:,} of {:,} images in {}".format(*labeled[place], show(place)) for place in some}
    for chosen in some:
        count, total = labeled[chosen]
        if count == total or len(some) == 1:
            for place in some:
                if place != chosen:
                    message = "%s has labels for each image; not used: those of %s"
                    get_logger().info(message, show(chosen), numbers[place])
            return chosen
    raise UserError(f"ambiguous label locations: {' or '.join(numbers.values())}; keep the labels of one")
