"""Tells which splits have an image, so that a list that is not exact does not take images of other splits."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path

from data.image_io.file_kinds import image_suffixes
from data.source.dataset_spec import DatasetSpec
from data.source.listing.exact_rows import ExactRows
from data.source.listing.list_rows import ImageList, Row, is_list, read_list
from data.source.listing.relocated_rows import RelocatedRows, image_of_other_split, relocate
from data.source.walk import Folders
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.logger import get_logger


class SplitsOfImages:
    """Looks up the splits that have an image: it is in a folder that a split names, or in one of its lists.

    Nothing is read before the first look-up. Images are compared without symbolic links to their folders.
    """

    def __init__(self, spec: DatasetSpec, folders: Folders) -> None:
        self._entries = {split: files.images for split, files in spec.listed_splits.items()}
        self._folders = folders
        self._suffixes = image_suffixes(spec.pixels)
        self._splits_of_folder: dict[str, frozenset[str]] = {}  # real paths
        self._images_of_list: dict[Path, set[str]] = {}  # see `_exact_images`
        self._readers: dict[tuple[str, Path], RelocatedRows] = {}  # by split and list

    def relocate(self, image_list: ImageList, split: str) -> RelocatedRows:
        """Returns a reader for a list of ``split`` none of whose rows is exact. Logs a warning if another list that can
        be read alike names the same images: splits share them, as trainval.txt and val.txt do, or some are missing.

        Raises UserError if the images cannot be found, or if a row matches an image of another split.
        """
        self._images_of_list[image_list.file] = set()  # none is exact
        reader = self._reader(image_list, split)
        row_of_image = self._row_of_image(image_list, reader)
        for image, row in row_of_image.items():
            other = self._other_split(image, split)
            if other:
                raise image_of_other_split(image_list, row, reader.images(row)[0], other)
        for other, other_list in self._relocated_lists(image_list, split):
            try:
                other_reader = self._reader(other_list, other)
            except UserError:  # reported when its split is used; it may mean these images
                other_reader = reader
            images_of_other = self._row_of_image(other_list, other_reader)
            shared = [row for image, row in row_of_image.items() if image in images_of_other]
            if shared and other_reader != reader:
                raise image_of_other_split(image_list, shared[0], reader.images(shared[0])[0], other)
            if shared:
                get_logger().warning(
                    "%s: %d of its images (first: %s) are also in %s of '%s', whose rows can be read alike; if "
                    "they should be other images of the same names, give paths of images relative to %s",
                    image_list.file,
                    len(shared),
                    relative_name(reader.images(shared[0])[0], image_list.root),
                    other_list.file,
                    other,
                    image_list.root,
                )
        return reader

    def _reader(self, image_list: ImageList, split: str) -> RelocatedRows:
        key = (split, image_list.file)
        if key not in self._readers:
            self._readers[key] = relocate(image_list, partial(self._other_split, split=split))
        return self._readers[key]

    def _other_split(self, image: str, split: str) -> str | None:
        """Returns the first other split that has an image, by a folder or an exact list, or None. An image that
        ``split`` itself has in this way is not considered one of another."""
        path = self._real(image)
        splits = self._splits_with_folder(os.path.dirname(path)) | self._splits_of_image.get(path, frozenset())
        if split in splits:
            return None
        return next((name for name in self._entries if name in splits), None)

    def _splits_with_folder(self, folder: str) -> frozenset[str]:
        """Returns the splits that name a folder (its real path), or one above it."""
        if folder not in self._splits_of_folder:
            paths = {folder, *map(str, Path(folder).parents)}
            named = self._named_folders.items()
            self._splits_of_folder[folder] = frozenset(split for split, named in named if not paths.isdisjoint(named))
        return self._splits_of_folder[folder]

    @cached_property
    def _named_folders(self) -> dict[str, set[str]]:
        """The real paths of the folders that each split names."""
        return {
            split: {self._folders.real(str(entry)) for entry in entries if entry.is_dir()}
            for split, entries in self._entries.items()
        }

    @cached_property
    def _lists(self) -> dict[Path, ImageList]:
        """The lists that any split names and that can be read; others are reported when their splits are used."""
        lists: dict[Path, ImageList] = {}
        for entry in dict.fromkeys(itertools.chain.from_iterable(self._entries.values())):
            if is_list(entry):
                with contextlib.suppress(UserError):
                    lists[entry] = read_list(entry, self._folders, self._suffixes)
        return lists

    @cached_property
    def _splits_of_image(self) -> dict[str, frozenset[str]]:
        """The splits that have an image in an exact row of a list."""
        splits_of_image: dict[str, frozenset[str]] = {}
        for file, image_list in self._lists.items():
            splits = frozenset(split for split, entries in self._entries.items() if file in entries)
            for image in self._exact_images(image_list):
                known = splits_of_image.get(image)
                splits_of_image[image] = known | splits if known else splits
        return splits_of_image

    def _exact_images(self, image_list: ImageList) -> set[str]:
        """Returns the images that a list names in exact rows."""
        if image_list.file not in self._images_of_list:
            self._images_of_list[image_list.file] = set(self._row_of_image(image_list, ExactRows(image_list)))
        return self._images_of_list[image_list.file]

    def _relocated_lists(self, image_list: ImageList, split: str) -> Iterator[tuple[str, ImageList]]:
        """Yields the lists without exact rows that only other splits than ``split`` name, with their splits, if they
        have a row with the stem of one in ``image_list``: usually none has, which spares the search for its images."""
        stems = {row.stem for row in image_list.rows}
        for other, entries in self._entries.items():
            for entry in entries:
                if entry not in self._lists or entry in self._entries[split] or self._exact_images(self._lists[entry]):
                    continue
                if not stems.isdisjoint(row.stem for row in self._lists[entry].rows):
                    yield other, self._lists[entry]

    def _row_of_image(self, image_list: ImageList, reader: ExactRows | RelocatedRows) -> dict[str, Row]:
        """Returns the row of each image that a list names, by the image's path without links to its folder."""
        images_of_rows = ((row, reader.images(row)) for row in image_list.rows)
        return {self._real(images[0]): row for row, images in images_of_rows if len(images) == 1}

    def _real(self, image: str) -> str:
        folder, name = os.path.split(image)
        return os.path.join(self._folders.real(folder), name)
