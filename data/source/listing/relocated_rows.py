"""Finds the images of lists that were written for another folder (CVAT's ``data/obj_train_data/a.jpg``, absolute paths
of another machine) or that lack the folders of their images (``a.jpg`` for images/train/a.jpg)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.image_io.file_kinds import is_image
from data.source.listing.list_rows import ImageList, Row
from data.source.missing_data import labels_without_images
from data.source.walk import Folders, walk
from utils.errors import UserError
from utils.files.paths import relative_name

_MAX_TRIED_ROWS = 10


@dataclass(frozen=True, slots=True)
class RelocatedRows:
    """Resolves all rows of a list as paths in one folder. Readers are equal if they have the same folder and drop the
    same number of parts of each row; the dropped parts themselves may differ, see `Row.contradicts`."""

    base: Path
    num_dropped: int  # leading folders of each row, which belong to another location
    folders: Folders = field(compare=False)
    suffixes: frozenset[str] = field(compare=False)

    def paths_of_rows(self, image_list: ImageList) -> list[list[str]]:
        """Returns the `images` of each row of a list."""
        return list(map(self.images, image_list.rows))

    def images(self, row: Row) -> list[str]:
        """Returns the absolute path of the image that a row names, or those of several that have the stem."""
        parts = row.parts[self.num_dropped :]
        if not parts:  # fewer folders than the row that determined ``num_dropped``
            return []
        path = self.folders.normal(os.path.join(self.base, *parts))
        if not is_image(path, self.suffixes):
            return self.folders.files_of_stem(path, self.suffixes)
        return [path] if self.folders.exists(path) else []


def relocate(image_list: ImageList, other_split: Callable[[str], str | None]) -> RelocatedRows:
    """Returns a reader for a list none of whose rows is exact. The first row that fits exactly one image
    determines the reader.

    ``other_split``: returns the other split that has an image, or None. Such an image may only have the same name and
    other labels, so it is not considered. Raises UserError if none of the first rows fits an image, or if one fits
    several.
    """
    tried_rows = image_list.rows[:_MAX_TRIED_ROWS]
    candidates = _images_called_like(tried_rows, image_list)
    own_candidates = [image for image in candidates if other_split(image) is None]
    for row in tried_rows:
        num_dropped, images = _fitting_images(row, own_candidates, image_list)
        if len(images) > 1:
            raise _several_images(row, sorted(images), image_list)
        if images:
            base = _base_of(images[0], row, num_dropped)
            return RelocatedRows(base, num_dropped, image_list.folders, image_list.suffixes)
    raise _no_image(image_list, candidates, other_split)


def image_of_other_split(image_list: ImageList, row: Row, image: str, owner: str) -> UserError:
    """Returns the error about a row of a relocated list that may mean an ``image`` of another split, the ``owner``."""
    difference = f"is an image of {owner}"
    return UserError(f"{_not_an_image(image_list, row)}; {_same_name(image, difference, image_list.root)}")


def _images_called_like(rows: Sequence[Row], image_list: ImageList) -> list[str]:
    """Returns the paths of the images in the data set that have the names of ``rows``, with or without suffix."""
    names = {row.parts[-1] for row in rows}
    top = image_list.voc_image_folder  # elsewhere, VOC's masks have the same names
    if not top.is_dir():
        top = image_list.root
    if not top.is_dir():
        return []
    images = [entry for visit in walk(top) for entry in visit.entries if is_image(entry.name, image_list.suffixes)]
    return [entry.path for entry in images if entry.name in names or os.path.splitext(entry.name)[0] in names]


def _fitting_images(row: Row, candidates: Sequence[str], image_list: ImageList) -> tuple[int, list[str]]:
    """Returns the smallest number of leading parts to drop from a row so that the rest fits images, and these images.

    A row of which nothing is dropped fits the end of any path. Otherwise, the rest must be a path in the data set's
    folder, the list's, or one above.
    """
    root = image_list.root
    bases = {*image_list.file.parents, root, *root.parents}  # above root: rows that also name the data set's folder
    has_suffix = is_image(row.text, image_list.suffixes)
    for num_dropped in range(len(row.parts)):
        images = _paths_ending_in(row.parts[num_dropped:], candidates, has_suffix=has_suffix)
        if num_dropped:
            images = [image for image in images if _base_of(image, row, num_dropped) in bases]
        if images:
            return num_dropped, images
    return len(row.parts), []


def _paths_ending_in(tail: list[str], paths: Sequence[str], *, has_suffix: bool) -> list[str]:
    """Returns the ``paths`` that end in the parts ``tail``, compared without suffixes unless ``has_suffix``."""
    ending = os.sep + os.path.join(*tail)
    if has_suffix:
        return [path for path in paths if path.endswith(ending)]
    return [path for path in paths if os.path.splitext(path)[0].endswith(ending)]


def _base_of(image: str, row: Row, num_dropped: int) -> Path:
    """Returns the folder in which a row without its first ``num_dropped`` parts is the path of ``image``."""
    return Path(image).parents[len(row.parts) - num_dropped - 1]


def _no_image(image_list: ImageList, candidates: Sequence[str], other_split: Callable[[str], str | None]) -> UserError:
    """Returns the error about a list whose first rows fit none of the ``candidates``."""
    root = image_list.root
    first = image_list.rows[0]
    message = f"{_not_an_image(image_list, first)}, and neither is any other row"
    if len(image_list.rows) > _MAX_TRIED_ROWS:
        message += f" of the first {_MAX_TRIED_ROWS}"
    if not candidates:
        return UserError(message + (labels_without_images(root) or f"; give paths of images relative to {root}"))
    image = max(sorted(candidates), key=lambda path: _num_common_parts(path, first))
    split = other_split(image)
    difference = f"is an image of '{split}'" if split else "is in another folder"
    return UserError(f"{message}; {_same_name(image, difference, root)}")


def _not_an_image(image_list: ImageList, row: Row) -> str:
    return f"{image_list.file}:{row.line}: {row.text[:200]!r} is not an image"


def _same_name(image: str, difference: str, root: Path) -> str:
    """Returns the part of a message about an image that has the name of a row but is probably another one."""
    name = relative_name(image, root)
    advice = f"give paths of images relative to {root}: '{name}' if this image is meant"
    return f"{name} has the same name, but {difference}; {advice}"


def _several_images(row: Row, images: list[str], image_list: ImageList) -> UserError:
    """Returns the error about a row that may name any of several ``images``."""
    shown = images if len(images) <= 2 else [*images[:2], "..."]
    return UserError(
        f"{image_list.file}:{row.line}: {len(images)} images fit {row.text[:200]!r}: {', '.join(shown)}; name images "
        f"by their paths relative to {image_list.root}"
    )


def _num_common_parts(image: str, row: Row) -> int:
    """Returns how many parts at their ends a path and a row have in common, without suffixes."""
    image_parts = Row(0, os.path.splitext(image)[0]).parts
    row_parts = Row(0, os.path.splitext(row.text)[0]).parts
    pairs = zip(reversed(image_parts), reversed(row_parts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
