"""Reads relocated lists (`relocated_rows`), and keeps each from the images of other splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from data.image_io.file_kinds import image_suffixes
from data.source.dataset_spec import DatasetSpec
from data.source.listing.list_rows import ImageList, Row, read_list
from data.source.listing.relocated_rows import RelocatedRows, image_of_other_split, relocate
from data.source.listing.splits_of_images import SplitsOfImages
from data.source.walk import Folders
from utils.errors import UserError


@dataclass(frozen=True, slots=True)
class SharedImages:
    """The images of a relocated list that a list of another split also names, by rows that may mean the same files."""

    paths: list[str]  # at least one
    file: Path  # the other list
    split: str


class RelocatedLists:
    """Reads the lists of a data set, each once, and finds out how relocated ones are read."""

    def __init__(self, spec: DatasetSpec, folders: Folders) -> None:
        self.read_list = cache(partial(read_list, folders=folders, suffixes=image_suffixes(spec.pixels)))
        self._splits = SplitsOfImages(spec, folders, self.read_list)
        self._readers: dict[tuple[str, Path], RelocatedRows] = {}  # by split and list

    def relocate(self, image_list: ImageList, split: str) -> tuple[list[list[str]], list[SharedImages]]:
        """Returns the paths of the images that each row of a list of ``split`` may name, if none of its rows is exact,
        and the images that it shares with lists of other splits, as trainval.txt and val.txt do.

        Raises UserError if the images cannot be found, or if a row matches an image of another split.
        """
        reader = self._reader(image_list, split)
        paths_of_rows = reader.paths_of_rows(image_list)
        row_of_image = image_list.row_of_image(paths_of_rows)
        for image, row in row_of_image.items():
            other = self._splits.other_split(image, split)
            if other:
                raise image_of_other_split(image_list, row, reader.images(row)[0], f"'{other}'")
        return paths_of_rows, list(self._shared_images(image_list, split, reader, row_of_image))

    def _reader(self, image_list: ImageList, split: str) -> RelocatedRows:
        key = (split, image_list.file)
        if key not in self._readers:
            self._readers[key] = relocate(image_list, partial(self._splits.other_split, split=split))
        return self._readers[key]

    def _shared_images(
        self, image_list: ImageList, split: str, reader: RelocatedRows, row_of_image: Mapping[str, Row]
    ) -> Iterator[SharedImages]:
        """Yields the images that a list shares with other relocated lists. Raises UserError if an image cannot be that
        of both rows: if the lists are read differently, or if the rows differ in the folders that are dropped."""
        stems = {row.stem for row in image_list.rows}
        for other, other_list in self._splits.inexact_lists(split):
            if stems.isdisjoint(row.stem for row in other_list.rows):
                continue  # usually, which spares the search for its images
            other_reader = self._reader_or(reader, other_list, other)
            other_rows = other_list.row_of_image(other_reader.paths_of_rows(other_list))
            paths: list[str] = []
            for image, row in row_of_image.items():
                if image not in other_rows:
                    continue
                path = reader.images(row)[0]
                if other_reader != reader or row.contradicts(other_rows[image]):
                    owner = f"'{other}' ({other_list.file}:{other_rows[image].line})"
                    raise image_of_other_split(image_list, row, path, owner)
                paths.append(path)
            if paths:
                yield SharedImages(paths, other_list.file, other)

    def _reader_or(self, reader: RelocatedRows, other_list: ImageList, other: str) -> RelocatedRows:
        """Returns the reader of another list or, if it cannot be read, ``reader``: its rows may mean the same images.
        The error is reported when its split is used."""
        try:
            return self._reader(other_list, other)
        except UserError:
            return reader
