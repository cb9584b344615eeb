"""Defines the image entries of a label file, and matches them with images by their file names (`NameMatcher`). For the
whole rule, of which this is the first step, see `data.labels.match_entries`.

For example, the splits are in images/train and images/val. If no other image is called 7.png, these file names match
images/train/a/7.png:

- "7.png" has no folder in common with it;
- "a/7.png" has one;
- "train/a/7.png" has two, up to the part that tells images/train from images/val: it names the split's folder;
- "test/7.png" has none, and has another folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from data.labels.image_names import ImageNames, common_folders, loose, num_folders
from data.labels.image_places import ImagePlaces, Place
from data.labels.known_images import KnownImage
from data.labels.rows import ROW_NUMBER, LabelRow, RawLabels, RowProblem
from data.split_files import OtherImages

ImageNumber: TypeAlias = int  # position in `known_images`


class ImageEntry(NamedTuple):
    """An image in the label file of a split."""

    file_name: str  # with /
    image_id: int | str
    labels: RawLabels

    @property
    def num_labeled(self) -> int:
        """Number of annotations, usable or not."""
        return self.labels.num_labeled

    @property
    def normal_name(self) -> str:
        """The file name as a path without "." and "..", to be compared with the names of images."""
        return os.path.normpath(self.file_name)

    @property
    def folder(self) -> str:
        """The folder of the file name, "" if it has none."""
        return os.path.dirname(self.normal_name)

    def has_labels_of(self, other: ImageEntry) -> bool:
        """Returns whether two entries have the same annotations, usable or not."""
        return _without_row_numbers(self.labels) == _without_row_numbers(other.labels)


def _without_row_numbers(labels: RawLabels) -> tuple[list[LabelRow], list[RowProblem]]:
    """Returns rows and problems, sorted, without their locations in the file."""
    column = ROW_NUMBER - 1  # the columns begin with the image, which a `LabelRow` lacks
    rows = sorted(row[:column] + row[column + 1 :] for row in labels.rows)
    return rows, sorted(problem._replace(row_number=-1) for problem in labels.problems)


@dataclass(slots=True, eq=False, kw_only=True)
class NameMatch:
    """The images that an entry matches by name, and where its image would be if it is none of these."""

    entry: ImageEntry
    images: tuple[ImageNumber, ...]
    num_own_folders: int  # folders of the file name besides those that all file names have in common
    place: Place  # see `ImagePlaces.closest`


@dataclass(slots=True, eq=False, kw_only=True)
class Candidate(NameMatch):
    """An entry that matches only one image by name, and so may be the image's."""

    number: ImageNumber
    image: KnownImage
    num_common_folders: int  # last folders that the file name has in common with the image
    names_split_folder: bool  # whether these tell the split of the image

    @property
    def is_literal(self) -> bool:
        """Whether the file name is literally that of the image, which then has another entry."""
        return any(self.entry.normal_name in (file.name, file.name_in_split) for file in self.image.files)

    @property
    def has_other_folder(self) -> bool:
        """Whether the file name differs from the image's path in a folder: the split's, or one below it."""
        return not self.names_split_folder and self.num_own_folders > self.num_common_folders


class NameMatcher:
    """Matches entries with images by name, and finds the places of missing images.

    Args:
        images: images of all splits with this label file.
        others: other places.
        entries: all entries of the label file.
    """

    def __init__(self, images: Sequence[KnownImage], others: OtherImages, entries: Sequence[ImageEntry]) -> None:
        self.names = ImageNames([file.name for file in image.files] for image in images)
        self._images = images
        self._outer_folders = common_folders(entry.file_name for entry in entries)
        self._places = ImagePlaces(images, others, self._outer_folders)
        split_folders = [image.split_folder for image in images]
        self._num_distinguishing_parts = _num_distinguishing_parts([*split_folders, *others.missing_folders])

    def match(self, entry: ImageEntry) -> NameMatch:
        """Returns the images that ``entry`` matches: a `Candidate` if it is only one."""
        numbers = self.names.find(entry.file_name, self._outer_folders)
        place = self._places.closest(entry.file_name, numbers)
        num_own_folders = num_folders(entry.file_name) - len(self._outer_folders)
        if len(numbers) != 1:
            return NameMatch(entry=entry, images=numbers, num_own_folders=num_own_folders, place=place)
        number = numbers[0]
        image = self._images[number]
        num_common_folders = self.names.agreement(entry.file_name, number)
        return Candidate(
            entry=entry,
            images=numbers,
            num_own_folders=num_own_folders,
            place=place,
            number=number,
            image=image,
            num_common_folders=num_common_folders,
            names_split_folder=self._names_split_folder(image, num_common_folders, num_own_folders),
        )

    def _names_split_folder(self, image: KnownImage, num_common_folders: int, num_own_folders: int) -> bool:
        """Returns whether the folders in common reach up to the part that tells the folder of the image's split from
        those of other splits, or at least into this folder if the file name has no more.

        For example, images/train/a/7.png has one subfolder, and one part tells images/train from images/val: two
        folders in common are needed, as in "train/a/7.png". If the splits are train/images and val/images, two parts
        tell them apart, but one in common is enough if the file name has no more: "images/7.png".
        """
        num_subfolders = image.num_subfolders
        if not image.split_folder:  # the data set's folder, which has no name of its own
            return num_common_folders >= max(num_subfolders, 1)
        num_needed = num_subfolders + self._num_distinguishing_parts[image.split_folder.rstrip("/")]
        return num_common_folders > num_subfolders and num_common_folders >= min(num_needed, num_own_folders)


def _num_distinguishing_parts(folders: Iterable[str]) -> dict[str, int]:
    """Returns, by folder, the number of last parts that tell it from the other ``folders``: 2 for train/images next to
    val/images. If all its parts are the end of another one, this is all."""
    parts_of = {folder.rstrip("/"): loose(folder.rstrip("/")).split("/") for folder in dict.fromkeys(folders)}
    counts = Counter(
        tuple(parts[start:]) for parts in set(map(tuple, parts_of.values())) for start in range(len(parts))
    )
    num_parts = {}
    for folder, parts in parts_of.items():
        unique = (count for count in range(1, len(parts)) if counts[tuple(parts[-count:])] == 1)
        num_parts[folder] = next(unique, len(parts))
    return num_parts
