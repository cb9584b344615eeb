"""Defines the files of a split: its images and their label files, as `data.source.files.list_split` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FileStamp(NamedTuple):
    """Size and time of a file, which change when it is edited."""

    size: int  # bytes
    mtime_ns: int


class ImageFile(NamedTuple):
    """An image that a split lists."""

    name: str  # relative to the data set's folder, with /
    name_in_split: str  # relative to the split's folder, with /; the bare name for images of a .txt list
    stamp: FileStamp | None  # None: not of this split (`OtherImages`)

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
    """Names what the one label file of a split may name besides the images of the split."""

    earlier_splits: Sequence[NamesOfImage] = ()  # without stamps: images of splits with this label file that the data
    later_splits: Sequence[NamesOfImage] = ()  # set names before this one, and after it
    unassigned: Sequence[str] = ()  # names of images of no split in the same folders
    missing: Sequence[str] = ()  # images that the lists of this split name, and that do not exist
    missing_elsewhere: Sequence[str] = ()  # those that lists of the other splits name
    is_split_missing: bool = False  # a folder or list of another split does not exist, so its images are not known


class LabelFile(NamedTuple):
    """A label file, which may be missing."""

    name: str  # relative to the data set's folder, with /
    stamp: FileStamp | None  # None: there is no such file
