"""Looks up which splits have an image, by their folders and by the exact rows of their lists."""

from __future__ import annotations

import contextlib
import itertools
import os
from functools import cached_property
from pathlib import Path

from data.source.dataset_spec import DatasetSpec
from data.source.listing.list_rows import ImageList, ImageLists, is_list
from data.source.walk import false_if_denied
from utils.errors import UserError


class SplitsOfImages:
    """Looks up the splits that have an image: it is in a folder that a split names, or in an exact row of its lists.

    Nothing is read before the first look-up. Images are compared without symbolic links to their folders.
    """

    def __init__(self, spec: DatasetSpec, lists: ImageLists) -> None:
        self._entries = {split: files.images for split, files in spec.listed_splits.items()}
        self._folders = lists.folders
        self._image_lists = lists
        self._splits_of_folder: dict[str, frozenset[str]] = {}  # real paths

    def other_split(self, image: str, split: str) -> str | None:
        """Returns the first other split that has an image, or None. An image that ``split`` itself has is not
        considered one of another."""
        path = self._folders.real_image(image)
        splits = self._splits_with_folder(os.path.dirname(path)) | self._splits_of_image.get(path, frozenset())
        if split in splits:
            return None
        return next((name for name in self._entries if name in splits), None)

    def relocated_lists_of_others(self, split: str) -> list[tuple[str, ImageList]]:
        """Returns the relocated lists that only other splits than ``split`` name, each with its split."""
        return [
            (other, self._lists[entry])
            for other, entries in self._entries.items()
            for entry in entries
            if entry in self._lists and entry not in self._entries[split] and self._lists[entry].is_relocated
        ]

    def _splits_with_folder(self, folder: str) -> frozenset[str]:
        """Returns the splits that name a folder (its real path), or one above it."""
        if folder not in self._splits_of_folder:
            paths = {folder, *map(str, Path(folder).parents)}
            self._splits_of_folder[folder] = frozenset(
                split for split, named in self._named_folders.items() if not paths.isdisjoint(named)
            )
        return self._splits_of_folder[folder]

    @cached_property
    def _named_folders(self) -> dict[str, set[str]]:
        """The real paths of the folders that each split names."""
        return {
            split: {self._folders.real(str(entry)) for entry in entries if false_if_denied(entry.is_dir)}
            for split, entries in self._entries.items()
        }

    @cached_property
    def _splits_of_image(self) -> dict[str, frozenset[str]]:
        """The splits that have an image in an exact row of a list."""
        splits_of_image: dict[str, frozenset[str]] = {}
        for file, image_list in self._lists.items():
            splits = frozenset(split for split, entries in self._entries.items() if file in entries)
            for image in image_list.row_of_image(image_list.exact_paths):
                known = splits_of_image.get(image)
                splits_of_image[image] = known | splits if known else splits
        return splits_of_image

    @cached_property
    def _lists(self) -> dict[Path, ImageList]:
        """The lists that any split names and that can be read; others are reported when their splits are used."""
        lists: dict[Path, ImageList] = {}
        for entry in dict.fromkeys(itertools.chain.from_iterable(self._entries.values())):
            if is_list(entry):
                with contextlib.suppress(UserError):
                    lists[entry] = self._image_lists.read(entry)
        return lists
