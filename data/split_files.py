"""Defines the files of a split, its images and their label files, as listed by `data.source.files.list_split`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FileStamp(NamedTuple):
    """Size and modification time of a file. An edit changes them."""

    size: int  # bytes
    mtime_ns: int


class ImageFile(NamedTuple):
    """An image that a split lists."""

    name: str  # relative to the data set's folder, with /
    name_in_split: str  # relative to the split's folder, with /; the bare name for images of a .txt list
    stamp: FileStamp | None  # None for an image outside the split (`OtherImages`)

    @property
    def base_name(self) -> str:
        """The name without folders."""
        return self.name.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without folders and suffix."""
        return self.name.rpartition("/")[2].rpartition(".")[0]


FilesOfImage = tuple[ImageFile, ...]  # an image under each of its names, the usual one first


class SplitPlaces(NamedTuple):
    """Images and folders named by splits that share one label file."""

    images: Sequence[FilesOfImage] = ()  # without stamps; empty for this split
    # Existing folders that the splits name, and those that contain the images of their lists, relative to the data
    # set's folder, which is "".
    folders: Sequence[str] = ()
    missing: Sequence[str] = ()  # nonexistent images that their lists name


class OtherImages(NamedTuple):
    """Where a label file that splits share may name images, besides this split's own."""

    earlier: SplitPlaces = SplitPlaces()  # splits that share the label file and precede this one in the data set
    this: SplitPlaces = SplitPlaces()
    later: SplitPlaces = SplitPlaces()
    unassigned: Sequence[str] = ()  # names of images near those of the splits that belong to no split
    missing_folders: Sequence[str] = ()  # folders and lists of the other splits that are missing or empty


class LabelFile(NamedTuple):
    """A label file, which may be missing."""

    name: str  # relative to the data set's folder, with /
    stamp: FileStamp | None  # None if the file does not exist
