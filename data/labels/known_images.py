"""Collects the images of all splits that share a label file, because its entries may be of any of them."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from data.labels.label_format import LabelRequest
from data.split_files import FilesOfImage


class SplitOrder(Enum):
    """The position of a split in the data set, relative to the split that is read."""

    EARLIER = auto()
    THIS = auto()
    LATER = auto()


class KnownImage(NamedTuple):
    """An image of any of the splits that share a label file."""

    files: FilesOfImage
    splits: frozenset[SplitOrder]  # all that have the image

    @property
    def num_subfolders(self) -> int:
        """Number of folders between the folder of the split and the image."""
        return min(file.name_in_split.count("/") for file in self.files)

    @property
    def split_folder(self) -> str:
        """Folder of the split that has the image; of a list, that of the image. It is "" or ends with a slash."""
        file = self.files[0]
        return file.name.removesuffix(file.name_in_split)


def known_images(request: LabelRequest) -> list[KnownImage]:
    """Returns the images of all splits with this label file, each once. The images of the split that is read come
    first, at their positions in ``request.images``."""
    images_of_split = {
        SplitOrder.THIS: [(image, *request.aliases.get(image.name, ())) for image in request.images],
        SplitOrder.EARLIER: request.others.earlier.images,
        SplitOrder.LATER: request.others.later.images,
    }
    names_in_split = {
        split: {file.name for files in images for file in files} for split, images in images_of_split.items()
    }
    known: dict[str, KnownImage] = {}  # by usual name
    for split, images in images_of_split.items():
        for files in images:
            name = files[0].name
            splits = frozenset(other for other, in_split in names_in_split.items() if name in in_split)
            if split is SplitOrder.THIS or SplitOrder.THIS not in splits:
                known.setdefault(name, KnownImage(files, splits))
    return list(known.values())
