"""Finds images that are in both the training and the validation split."""

from __future__ import annotations

import os
from collections.abc import Iterator

from data.dataset.spec import DatasetSpec
from data.index.index import DatasetIndex
from utils.files.paths import path_of
from utils.logger import get_logger


def warn_of_shared_images(spec: DatasetSpec, train: DatasetIndex, val: DatasetIndex) -> None:
    """Warns about images that are in both splits."""
    if spec.held_out:
        return
    val_paths = set(real_paths(val))
    shared = len(val_paths.intersection(real_paths(train)))
    if shared:
        count = f"{shared:,}" if shared < len(val_paths) else "all"
        message = "%s: %s of the %s validation images are also training images; scores say little about other images"
        get_logger().warning(message, spec.source, count, f"{len(val_paths):,}")


def real_paths(index: DatasetIndex) -> Iterator[str]:
    """Yields the path of each image, following symbolic links to folders but not to images."""
    real_folders: dict[str, str] = {}
    for path in index.paths:
        folder, _, name = path.rpartition("/")
        if folder not in real_folders:
            real_folders[folder] = os.path.realpath(path_of(folder, index.root))
        yield f"{real_folders[folder]}/{name}"
