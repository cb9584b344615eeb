"""Finds the images that symbolic links to folders show under several names. `united_names` unites these names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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
    for (real_folder, _), files in same_images.items():
        if len(files) > 1:
            usual = next((file for file in files if _folder_of(file, real_root) == real_folder), files[0])
            aliases[usual.name] = [file for file in files if file is not usual]
    return aliases


def _folder_of(image: ImageFile, real_root: str) -> str:
    """Returns the path of an image's folder, from the image's name."""
    return path_of(image.name.rpartition("/")[0], real_root)
