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


NamesOfImage = tuple[ImageFile, ...]  # an image under each of its names, the usual one first


class OtherImages(NamedTuple):
    """Images outside the split that the split's label file may name."""

    # Images, without stamps, of the splits that share this label file and precede or follow this split in the data set.
    earlier_splits: Sequence[NamesOfImage] = ()
    later_splits: Sequence[NamesOfImage] = ()
    unassigned: Sequence[str] = ()  # names of images in the same folders that belong to no split
    missing: Sequence[str] = ()  # nonexistent images that the lists of this split name
    missing_elsewhere: Sequence[str] = ()  # nonexistent images that the lists of the other splits name
    without_images: Sequence[str] = ()  # folders and lists of the other splits that are missing or name no image


class LabelFile(NamedTuple):
    """A label file, which may be missing."""

    name: str  # relative to the data set's folder, with /
    stamp: FileStamp | None  # None if the file does not exist
