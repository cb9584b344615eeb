"""Resolves the rows of relocated lists: lists none of whose rows is the path of an image, because they were written for
another folder or machine, or lack the folders of the images.

1. The first row that fits exactly one image of the data set determines how all rows are read (`_Relocation`). Images
   that another split names by their folder or by an exact row are not considered.

       row                          image                      dropped from each row   folder of the rest
       /home/me/set/images/0.jpg    set/images/0.jpg           3 folders               set
       data/obj_train_data/0.jpg    set/obj_train_data/0.jpg   1 folder                set
       0.jpg                        set/images/train/0.jpg     nothing                 set/images/train

2. Rows that contradict each other (`Row.contradicts`), such as ``a/images/0.jpg`` and ``b/images/0.jpg``, mean
   different images, even if both are read as ``images/0.jpg`` because their first folders are dropped. Otherwise, as
   in trainval.txt and val.txt, they mean the same image. What becomes of a row's image that is also named by ...

       the folder or an exact row of         the list is refused           ... is not an image; ... has the same name,
       another split                                                       but is an image of 'val'
       a relocated list of another split,
       - by a contradicting row, or if       the list is refused           the same, with that list and its line
         its rows are read otherwise
       - by another row                      it is used in both splits     warning: ... are also in other lists
       the same list,
       - by a contradicting row              it is missing                 ... not found; ... is read for ...
       - by another row                      it is used once               ... is listed twice; used once
       another list of the split,
       - by a contradicting row              it is used once: the lists    ... are both read as ...; used once
                                             may be of two machines        (and a warning)
       - by another row                      it is used once               ... is listed twice; used once
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.images.kinds import is_image
from data.source.dataset_spec import DatasetSpec
from data.source.listing.list_rows import ImageList, ImageLists, Row
from data.source.listing.splits_of_images import SplitsOfImages
from data.source.missing_data import labels_without_images
from data.source.walk import walk
from utils.errors import UserError
from utils.files.paths import relative_name

_MAX_TRIED_ROWS = 10


@dataclass(slots=True)
class ResolvedRows:
    """The images that the rows of a list name."""

    paths_of_rows: list[list[str]]  # for each row, the path of its image, or of several that have the stem
    missing: dict[int, str] = field(default_factory=dict)  # by line, why the image is missing despite its path
    repeated: dict[int, str] = field(default_factory=dict)  # by line, how the row repeats one of another list
    notes: list[str] = field(default_factory=list)  # for the log
    warnings: list[str] = field(default_factory=list)  # for the log


class _Relocation(NamedTuple):
    """How all rows of a list are read: without their first folders, they are paths in one folder."""

    num_dropped: int  # folders that the rows begin with, and that belong to another location
    base: Path  # folder of the rest

    def paths_of(self, row: Row, image_list: ImageList) -> list[str]:
        """Returns the absolute path of the image that a row names, or those of several that have the stem."""
        parts = row.parts[self.num_dropped :]
        if not parts:  # fewer folders than the row that determined ``num_dropped``
            return []
        path = image_list.normal(os.path.join(self.base, *parts))
        if not is_image(path, image_list.suffixes):
            return image_list.folders.files_of_stem(path, image_list.suffixes)
        return [path] if image_list.folders.exists(path) else []

    def paths_of_rows(self, image_list: ImageList) -> list[list[str]]:
        """Returns the `paths_of` each row of a list."""
        return [self.paths_of(row, image_list) for row in image_list.rows]


class _SharedImages(NamedTuple):
    """The images of a relocated list that a list of another split also names, by rows that may mean the same files."""

    paths: list[str]  # at least one
    file: Path  # the other list
    split: str


class RelocatedLists:
    """Resolves the rows of the relocated lists that ``split`` names. Of two lists with an image, the one resolved later
    repeats it."""

    def __init__(self, spec: DatasetSpec, split: str, lists: ImageLists) -> None:
        self._split = split
        self._splits = SplitsOfImages(spec, lists)
        self._relocations: dict[tuple[str, Path], _Relocation] = {}  # by split and list
        self._first_rows: dict[str, tuple[Row, ImageList]] = {}  # of the images in the resolved lists, by path

    def resolve(self, image_list: ImageList) -> ResolvedRows:
        """Resolves the rows of a relocated list. Raises UserError if its images cannot be found, or if a row matches an
        image of another split."""
        relocation = self._relocation(image_list, self._split)
        resolved = ResolvedRows(relocation.paths_of_rows(image_list))
        row_of_image = image_list.row_of_image(resolved.paths_of_rows)
        self._check_no_other_split_has(row_of_image, image_list, relocation)
        shared = list(self._shared_images(row_of_image, image_list, relocation))
        self._find_contradictions(resolved, image_list)
        resolved.notes = _how_rows_are_read(resolved, image_list)
        if resolved.repeated:
            resolved.warnings.append(self._repeated_rows_warning(resolved, image_list))
        if shared:
            resolved.warnings.append(_shared_images_warning(shared, image_list))
        return resolved

    def _relocation(self, image_list: ImageList, split: str) -> _Relocation:
        """Returns how the rows of a list of ``split`` are read. Raises UserError if their images are not found."""
        key = (split, image_list.file)
        if key not in self._relocations:
            self._relocations[key] = _find_relocation(image_list, partial(self._splits.other_split, split=split))
        return self._relocations[key]

    def _check_no_other_split_has(
        self, row_of_image: Mapping[str, Row], image_list: ImageList, relocation: _Relocation
    ) -> None:
        """Raises UserError if another split names an image of a list by its folder or by an exact row.
        ``row_of_image``: see `ImageList.row_of_image`."""
        for image, row in row_of_image.items():
            other = self._splits.other_split(image, self._split)
            if other:
                raise _image_of_other_split(image_list, row, relocation, f"'{other}'")

    def _shared_images(
        self, row_of_image: Mapping[str, Row], image_list: ImageList, relocation: _Relocation
    ) -> Iterator[_SharedImages]:
        """Yields the images that a list shares with relocated lists of other splits. Raises UserError if an image
        cannot be that of both rows: if the lists are read differently, or if the rows contradict each other.
        ``row_of_image``: see `ImageList.row_of_image`."""
        stems = {row.stem for row in image_list.rows}
        for other, other_list in self._splits.relocated_lists_of_others(self._split):
            if stems.isdisjoint(row.stem for row in other_list.rows):
                continue  # usually, which spares the search for its images
            other_relocation = self._relocation_or(relocation, other_list, other)
            other_rows = other_list.row_of_image(other_relocation.paths_of_rows(other_list))
            paths: list[str] = []
            for image, row in row_of_image.items():
                if image not in other_rows:
                    continue
                if other_relocation != relocation or row.contradicts(other_rows[image]):
                    owner = f"'{other}' ({other_list.file}:{other_rows[image].line})"
                    raise _image_of_other_split(image_list, row, relocation, owner)
                paths += relocation.paths_of(row, image_list)
            if paths:
                yield _SharedImages(paths, other_list.file, other)

    def _relocation_or(self, default: _Relocation, other_list: ImageList, other: str) -> _Relocation:
        """Returns how the rows of another list are read, or ``default`` if its images are not found: its rows may mean
        the same images. The error is reported when its split is used."""
        try:
            return self._relocation(other_list, other)
        except UserError:
            return default

    def _find_contradictions(self, resolved: ResolvedRows, image_list: ImageList) -> None:
        """Finds the rows that contradict the first row of their image in this list, or in any list of the split."""
        first_in_list: dict[str, Row] = {}  # by path
        for row, paths in zip(image_list.rows, resolved.paths_of_rows, strict=True):
            if len(paths) != 1 or not image_list.folders.is_file(paths[0]):
                continue
            path = paths[0]
            first = first_in_list.setdefault(path, row)
            if row.contradicts(first):
                name = relative_name(path, image_list.root)
                reason = f"{name} is read for {first.text} ({image_list.location(first)})"
                resolved.missing[row.line] = f"{row.text} not found; {reason}"
                continue
            first, first_list = self._first_rows.setdefault(path, (row, image_list))
            if row.contradicts(first):
                name = relative_name(path, image_list.root)
                rows = f"{row.text} and {first.text} ({first_list.location(first)})"
                resolved.repeated[row.line] = f"{rows} are both read as {name}; used once"

    def _repeated_rows_warning(self, resolved: ResolvedRows, image_list: ImageList) -> str:
        """Returns a warning about rows that are read as images of other lists of the split, although they contradict
        the rows of these."""
        rows = zip(image_list.rows, resolved.paths_of_rows, strict=True)
        row, path = next((row, paths[0]) for row, paths in rows if row.line in resolved.repeated)
        first, first_list = self._first_rows[path]
        both = f"{row.text} ({image_list.location(row)}) and {first.text} ({first_list.location(first)})"
        counts = f"{len(resolved.repeated):,} of {len(image_list.rows):,} rows"
        return (
            f"{image_list.file}: {counts} are read as images that other lists of the split name by other folders "
            f"(first: {both} are {relative_name(path, image_list.root)}); each is used once; if different images are "
            f"meant, give paths of images relative to {image_list.root}"
        )


def _how_rows_are_read(resolved: ResolvedRows, image_list: ImageList) -> list[str]:
    """Returns a note with the first row that names an image as an example, or nothing if none does."""
    for row, paths in zip(image_list.rows, resolved.paths_of_rows, strict=True):
        if len(paths) == 1:
            example = f"line {row.line}: {row.text} is {relative_name(paths[0], image_list.root)}"
            return [f"{image_list.file}: no row names an image as written; rows are read like {example}"]
    return []


def _shared_images_warning(shared: Sequence[_SharedImages], image_list: ImageList) -> str:
    counts = ", ".join(f"{len(other.paths):,} in {other.file} of '{other.split}'" for other in shared)
    first = relative_name(shared[0].paths[0], image_list.root)
    advice = f"if other images of these names are meant, give paths of images relative to {image_list.root}"
    problem = f"some of its images (first: {first}) are also in other lists, whose rows could mean the same files"
    return f"{image_list.file}: {problem}: {counts}; {advice}"


# How the rows of a list are read


def _find_relocation(image_list: ImageList, other_split: Callable[[str], str | None]) -> _Relocation:
    """Returns how the rows of a relocated list are read, from the first row that fits exactly one image.

    ``other_split``: returns the other split that has an image, or None. Such an image may have the same name by
    chance, and other labels, so it is not considered. Raises UserError if none of the first rows fits an image, or if
    one fits several.
    """
    tried_rows = image_list.rows[:_MAX_TRIED_ROWS]
    candidates = _images_called_like(tried_rows, image_list)
    own_candidates = [image for image in candidates if other_split(image) is None]
    for row in tried_rows:
        num_dropped, images = _fitting_images(row, own_candidates, image_list)
        if len(images) > 1:
            raise _several_images(row, sorted(images), image_list)
        if images:
            return _Relocation(num_dropped, _base_of(images[0], row, num_dropped))
    raise _no_image(image_list, candidates, other_split)


def _images_called_like(rows: Sequence[Row], image_list: ImageList) -> list[str]:
    """Returns the paths of the images in the data set that have the names of ``rows``, with or without suffix."""
    names = {row.parts[-1] for row in rows}
    top = image_list.voc_image_folder  # elsewhere, VOC's masks have the same names
    if top is None or not top.is_dir():
        top = image_list.root
    if not top.is_dir():
        return []
    images = [entry for visit in walk(top) for entry in visit.entries if is_image(entry.name, image_list.suffixes)]
    return [entry.path for entry in images if entry.name in names or os.path.splitext(entry.name)[0] in names]


def _fitting_images(row: Row, candidates: Sequence[str], image_list: ImageList) -> tuple[int, list[str]]:
    """Returns the smallest number of folders to drop from a row so that the rest fits images, and these images.

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


# Why a list is refused


def _image_of_other_split(image_list: ImageList, row: Row, relocation: _Relocation, owner: str) -> UserError:
    """Returns the error about a row that may mean an image of another split. ``owner``: that split, and the row that
    names the image."""
    image = relocation.paths_of(row, image_list)[0]
    return UserError(
        f"{_not_an_image(image_list, row)}; {_same_name(image, f'is an image of {owner}', image_list.root)}"
    )


def _no_image(image_list: ImageList, candidates: Sequence[str], other_split: Callable[[str], str | None]) -> UserError:
    """Returns the error about a list whose first rows fit none of the ``candidates``, images of all splits."""
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


def _several_images(row: Row, images: list[str], image_list: ImageList) -> UserError:
    """Returns the error about a row that may name any of several ``images``."""
    shown = images if len(images) <= 2 else [*images[:2], "..."]
    return UserError(
        f"{image_list.file}:{row.line}: {len(images)} images fit {row.text[:200]!r}: {', '.join(shown)}; name images "
        f"by their paths relative to {image_list.root}"
    )


def _not_an_image(image_list: ImageList, row: Row) -> str:
    return f"{image_list.file}:{row.line}: {row.text[:200]!r} is not an image"


def _same_name(image: str, difference: str, root: Path) -> str:
    """Returns the part of a message about an image that has the name of a row but is probably another one."""
    name = relative_name(image, root)
    advice = f"give paths of images relative to {root}: '{name}' if this image is meant"
    return f"{name} has the same name, but {difference}; {advice}"


def _num_common_parts(image: str, row: Row) -> int:
    """Returns how many parts at their ends a path and a row have in common, without suffixes."""
    image_parts = Row(0, os.path.splitext(image)[0]).parts
    row_parts = Row(0, os.path.splitext(row.text)[0]).parts
    pairs = zip(reversed(image_parts), reversed(row_parts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
