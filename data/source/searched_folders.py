"""Finds output folders that a data set searches for images: the plots of a run would become images of the next."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from data.source.dataset_spec import DatasetSpec, ListedSplit, Split, folders_of, joined_parts
from data.source.walk import walk
from utils.errors import UserError


def problem_of_output(path: Path, spec: DatasetSpec) -> str:
    """Returns the folder around ``path`` that ``spec`` searches, for messages, or "" if there is none."""
    folder = _searched_folder(path, spec)
    if folder is None:
        return ""
    return f"is in {folder}, which {spec.source} searches for images"


def _searched_folder(path: Path, spec: DatasetSpec) -> Path | None:
    """Returns the image folder of ``spec`` in which files below ``path`` would be found, also through links."""
    real = Path(os.path.realpath(path))
    for folder in dict.fromkeys(_image_folders([*spec.splits.values(), *spec.left_out.values()])):
        with suppress(UserError):  # a folder that cannot be listed, which is reported when its split is read
            if any(_is_found(real, Path(visit.real)) for visit in walk(folder)):
                return folder
    return None


def _image_folders(splits: Iterable[Split]) -> Iterator[Path]:
    """Yields the folders that are searched for images, with those of joined data sets. Lists and shards name their
    images one by one."""
    splits = list(splits)
    for split in splits:
        if isinstance(split, ListedSplit):
            yield from map(Path, folders_of(split))
    for part in joined_parts(splits):
        yield from _image_folders([*part.splits.values(), *part.left_out.values()])


def _is_found(path: Path, visited: Path) -> bool:
    """Returns whether a search of the folder ``visited`` comes to ``path``, which need not exist. Both are without
    links. Hidden folders are not searched."""
    return path.is_relative_to(visited) and not any(name.startswith(".") for name in path.relative_to(visited).parts)
