"""Reads .txt lists of images, as written by Darknet, CVAT and Pascal VOC, with one path per row."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from data.labels.findings import BAD_IMAGE, BAD_LISTED, MISSING_IMAGE, Finding
from data.source.missing_data import labels_without_images
from data.source.walk import Folders, none_if_missing, walk
from data.split_files import ImageFile
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.files.safe_io import read_text
from utils.logger import get_logger

MAX_LIST_BYTES = 1 << 31
NO_FILE = "a pipe or device, not a file"
_MAX_TRIED_ROWS = 10  # rows tried to locate the images of a list that was written for another folder


class NamedImage(NamedTuple):
    """An image, and the row of a list that names it."""

    location: str
    image: ImageFile


@dataclass(frozen=True, slots=True)
class ImageList:
    """The images that the rows of a list name, and the problems of other rows."""

    images: list[NamedImage]  # in order
    missing: list[str]  # names in the rows whose images do not exist, as paths with /
    findings: list[Finding]


class _Row(NamedTuple):
    line: int
    text: str


class _RowReader(Protocol):
    """Resolves the rows of a list to image paths."""

    def names_image(self, row: str) -> bool:
        """Returns whether a row looks like the path of an image."""

    def path(self, row: str) -> str | None:
        """Returns the absolute path of the image, or None if it does not exist."""


def read_image_list(
    file: Path, folders: Folders, suffixes: frozenset[str], other_splits: Mapping[str, Sequence[Path]] | None = None
) -> ImageList:
    """Reads a list. If no row names an image as written, determines the folder that the list was written for.

    ``other_splits``: the folders and lists of other splits. Raises UserError if the first rows still match no image, if
    one of them matches several, or if a row that is not read as written matches an image of another split.
    """
    rows = _rows(read_text(file, max_bytes=MAX_LIST_BYTES))
    reader: _RowReader = _RowsAsWritten(file.parent, folders, suffixes)
    if _match_nothing(rows, reader):
        others = _OtherSplits(other_splits or {}, folders, suffixes)
        relocated = _RelocatedList(rows, file, folders, suffixes, others)
        reader = relocated.choose_reader()
        relocated.check_images_of_others(reader)
        _log_reader(file, rows, reader, folders.root)
    images: list[NamedImage] = []
    missing: list[str] = []
    findings: list[Finding] = []
    for row in rows:
        location = f"{relative_name(file, folders.root)}:{row.line}"
        image = _read_row(row, location, reader, folders)
        if isinstance(image, ImageFile):
            images.append(NamedImage(location, image))
            continue
        findings.append(image)
        if image.kind == MISSING_IMAGE:
            missing.append(_name_in(row))
    return ImageList(images, missing, findings)


def listed_names(file: Path) -> list[str]:
    """Returns the names in the rows of a list, as paths with /, whether or not their images exist. Raises UserError if
    the list cannot be read."""
    return [_name_in(row) for row in _rows(read_text(file, max_bytes=MAX_LIST_BYTES))]


def is_image(name: str, suffixes: frozenset[str]) -> bool:
    """Returns whether a file has one of the ``suffixes`` of supported images. For any image, see `is_image_name`."""
    return os.path.splitext(name)[1].lower() in suffixes


def is_list(entry: Path) -> bool:
    """Returns whether an entry of a split is a list of images."""
    return entry.suffix.lower() == ".txt" and entry.is_file()


def is_row(path: str) -> bool:
    """Returns whether a list, which is UTF-8, can contain ``path``: one with a line break or outer spaces would be read
    differently."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return [row.text for row in _rows(path)] == [path]


def _rows(text: str) -> list[_Row]:
    rows = [_Row(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [row for row in rows if row.text]


def _read_row(row: _Row, location: str, reader: _RowReader, folders: Folders) -> ImageFile | Finding:
    """Returns the image of a row, or a finding about the row."""
    if not reader.names_image(row.text):
        return Finding(location, BAD_LISTED, f"{row.text[:100]!r} is not the path of an image", lost_images=1)
    path = reader.path(row.text)
    if path is None:
        reason = "not found"
        if _parts(row.text)[-1].startswith("."):
            reason += ", because names that begin with a dot are hidden; rename the image"
        return Finding(location, MISSING_IMAGE, f"{row.text} {reason}", lost_images=1)
    parent, name = os.path.split(path)
    entry = folders.entries(parent)[name]
    if not none_if_missing(entry.is_file):
        reason = "a folder, not a file" if none_if_missing(entry.is_dir) else NO_FILE
        return Finding(location, BAD_IMAGE, f"{row.text}: {reason}", lost_images=1, consequence="left out")
    return ImageFile(folders.name_in(parent) + name, name, folders.stamp(path))


class _RowsAsWritten:
    """Reads rows as absolute or relative paths. Rows that begin with ``./`` are relative to the list's folder or else
    to the data set's folder; other rows are relative to the data set's folder or else to the list's folder."""

    def __init__(self, list_folder: Path, folders: Folders, suffixes: frozenset[str]) -> None:
        self._list_folder = list_folder
        self._folders = folders
        self._suffixes = suffixes

    def names_image(self, row: str) -> bool:
        return is_image(row, self._suffixes)

    def path(self, row: str) -> str | None:
        if not self.names_image(row):
            return None
        bases = [self._folders.root, self._list_folder]
        if row.startswith("./"):
            bases.reverse()
        paths = [self._folders.normal(os.path.join(base, row)) for base in bases]
        for path in paths:
            if self._folders.exists(path):
                return path
        for path in paths:
            alike = self._folders.case_insensitive_match(path)
            if alike is not None:
                return alike
        return None


class _RelocatedRows:
    """Reads rows, with or without suffix, as paths in ``folder`` after dropping their first ``num_dropped`` folders,
    which belong to another location. ``is_complete``: only the separators or suffixes are not as written."""

    def __init__(
        self, folder: Path, num_dropped: int, folders: Folders, suffixes: frozenset[str], *, is_complete: bool
    ) -> None:
        self.is_complete = is_complete
        self._folder = folder
        self._num_dropped = num_dropped
        self._folders = folders
        self._suffixes = suffixes

    def is_like(self, other: _RelocatedRows) -> bool:
        """Returns whether equal rows are the same image for both."""
        return (self._folder, self._num_dropped) == (other._folder, other._num_dropped)

    def names_image(self, row: str) -> bool:
        return True

    def path(self, row: str) -> str | None:
        parts = _parts(row)[self._num_dropped :]
        if not parts:  # fewer folders than the row that determined ``num_dropped``
            return None
        path = os.path.join(self._folder, *parts)
        if is_image(row, self._suffixes):
            return path if self._folders.exists(path) else None
        endings = (*self._suffixes, *map(str.upper, self._suffixes))
        existing = [path + ending for ending in endings if self._folders.exists(path + ending)]
        return existing[0] if len(existing) == 1 else None


class _OtherSplits:
    """Tells which other split has an image, by a folder that the split names or by a row of its list.

    ``entries``: the folders and lists of the splits. Folders are compared without symbolic links.
    """

    def __init__(self, entries: Mapping[str, Sequence[Path]], folders: Folders, suffixes: frozenset[str]) -> None:
        self._folders = folders
        self._suffixes = suffixes
        self._split_of_folder: dict[str, str | None] = {}  # also of folders below those that splits name
        self._split_of_image: dict[str, str] = {}  # images in lists
        self._relocated_lists: list[tuple[str, _RelocatedList]] = []  # with their splits
        for split, paths in entries.items():
            for path in paths:
                if path.is_dir():
                    self._split_of_folder.setdefault(folders.real(str(path)), split)
                elif is_list(path):
                    self._add_list(split, path)

    def split_of(self, image: str) -> str | None:
        """Returns the split that has an image, given by its absolute path, or None."""
        path = self._real(image)
        if path in self._split_of_image:
            return self._split_of_image[path]
        folder = os.path.dirname(path)
        if folder not in self._split_of_folder:
            splits = (self._split_of_folder.get(str(parent)) for parent in Path(path).parents)
            self._split_of_folder[folder] = next((split for split in splits if split), None)
        return self._split_of_folder[folder]

    def add_relocated_lists(self, rows: list[_Row], own_reader: _RelocatedRows) -> None:
        """Adds the images of lists that are not read as written, if they share the name of an image with ``rows``.

        Lists that are read like ``rows`` are left out: they may share images, as trainval.txt and val.txt do.
        """
        stems = {_stem(row) for row in rows}
        for split, image_list in self._relocated_lists:
            if stems.isdisjoint(map(_stem, image_list.rows)):  # the usual case, which needs no search for its images
                continue
            try:
                reader = image_list.choose_reader()
            except UserError:  # reported when its split is used
                continue
            if not reader.is_like(own_reader):
                self._add_rows(split, image_list.rows, reader)

    def _add_list(self, split: str, file: Path) -> None:
        try:
            rows = _rows(read_text(file, max_bytes=MAX_LIST_BYTES))
        except UserError:  # reported when its split is used
            return
        reader = _RowsAsWritten(file.parent, self._folders, self._suffixes)
        if _match_nothing(rows, reader):
            self._relocated_lists.append((split, _RelocatedList(rows, file, self._folders, self._suffixes, self)))
        else:
            self._add_rows(split, rows, reader)

    def _add_rows(self, split: str, rows: list[_Row], reader: _RowReader) -> None:
        for row in rows:
            path = reader.path(row.text)
            if path is not None:
                self._split_of_image.setdefault(self._real(path), split)

    def _real(self, image: str) -> str:
        folder, name = os.path.split(image)
        return os.path.join(self._folders.real(folder), name)


@dataclass(frozen=True, slots=True)
class _RelocatedList:
    """A list whose rows name no image as written: they have Windows separators, are for another folder (CVAT's
    ``data/obj_train_data/a.jpg``, absolute paths of another machine), or lack suffixes (VOC's ``000012``)."""

    rows: list[_Row]
    file: Path
    folders: Folders
    suffixes: frozenset[str]
    others: _OtherSplits

    @property
    def _folders_of_complete_rows(self) -> tuple[Path, ...]:
        """Folders that complete rows without a suffix are relative to: splits may share these images."""
        return (self.folders.root, self.file.parent, _voc_images(self.file))

    def choose_reader(self) -> _RelocatedRows:
        """Returns a reader for the rows. The first row that fits exactly one image decides for all.

        Images elsewhere, or of other splits, only have the same names: they may have other labels. Raises UserError if
        none of the first rows fits an image, or if one fits several.
        """
        root = self.folders.root
        tried_rows = self.rows[:_MAX_TRIED_ROWS]
        candidates = _images_called_like(tried_rows, self.file, root, self.suffixes)
        for row in tried_rows:
            num_dropped, images = self._fitting_images(row, candidates)
            if len(images) > 1:
                raise _several_images(row, sorted(images), self.file, root)
            if images:
                folder = _base_of(images[0], row, num_dropped)
                return _RelocatedRows(
                    folder,
                    num_dropped,
                    self.folders,
                    self.suffixes,
                    is_complete=num_dropped == 0 and folder in self._folders_of_complete_rows,
                )
        raise self._no_image(candidates)

    def check_images_of_others(self, reader: _RelocatedRows) -> None:
        """Raises UserError if a row is not a complete path, but matches an image of another split."""
        if reader.is_complete:
            return
        self.others.add_relocated_lists(self.rows, reader)
        for row in self.rows:
            path = reader.path(row.text)
            split = self.others.split_of(path) if path else None
            if path and split:
                raise UserError(
                    f"{self.file}:{row.line}: {row.text[:200]!r} is not an image; {self._image_of(split, path)}; give "
                    f"paths of images relative to {self.folders.root}"
                )

    def _fitting_images(self, row: _Row, candidates: list[str]) -> tuple[int, list[str]]:
        """Returns how many leading parts of a row must be dropped, at least, so that the rest fits images, and these.

        A complete row fits the end of any path. Otherwise, the rest must be a path in the data set's folder, the
        list's, or one above. Images of other splits only fit complete rows in `_folders_of_complete_rows`.
        """
        root = self.folders.root
        bases = {*self.file.parents, root, *root.parents}  # above root: rows that also name the data set's folder
        has_suffix = is_image(row.text, self.suffixes)
        parts = _parts(row.text)
        for num_dropped in range(len(parts)):
            images = _paths_ending_in(parts[num_dropped:], candidates, has_suffix=has_suffix)
            if num_dropped:
                images = [image for image in images if _base_of(image, row, num_dropped) in bases]
            fitting = [
                image
                for image in images
                if self.others.split_of(image) is None
                or (num_dropped == 0 and _base_of(image, row, num_dropped) in self._folders_of_complete_rows)
            ]
            if fitting:
                return num_dropped, fitting
        return len(parts), []

    def _no_image(self, candidates: list[str]) -> UserError:
        """Returns the error about a list whose first rows fit none of the ``candidates``."""
        root = self.folders.root
        first = self.rows[0]
        message = f"{self.file}:{first.line}: {first.text[:200]!r} is not an image, and neither is any other row"
        if len(self.rows) > _MAX_TRIED_ROWS:
            message += f" of the first {_MAX_TRIED_ROWS}"
        if candidates:
            image = max(sorted(candidates), key=lambda path: _num_common_parts(path, first))
            split = self.others.split_of(image)
            where = f"{relative_name(Path(image), root)} has the same name, but is in another folder"
            message += f"; {self._image_of(split, image) if split else where}"
        return UserError(message + (labels_without_images(root) or f"; give paths of images relative to {root}"))

    def _image_of(self, split: str, image: str) -> str:
        return f"{relative_name(Path(image), self.folders.root)} has the same name, but is an image of '{split}'"


def _log_reader(file: Path, rows: list[_Row], reader: _RelocatedRows, root: Path) -> None:
    """Logs how the rows are read, by the example of the first that names an image."""
    for row in rows:
        path = reader.path(row.text)
        if path is not None:
            message = "%s: no row names an image as written; rows are read like line %d: %s is %s"
            get_logger().info(message, file, row.line, row.text, relative_name(Path(path), root))
            return


def _match_nothing(rows: list[_Row], reader: _RowReader) -> bool:
    """Returns whether there are rows, and none names an existing image."""
    return bool(rows) and all(reader.path(row.text) is None for row in rows)


def _num_common_parts(image: str, row: _Row) -> int:
    """Returns how many parts at their ends a path and a row have in common, without suffixes."""
    pairs = zip(*(reversed(_parts(os.path.splitext(path)[0])) for path in (image, row.text)), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _stem(row: _Row) -> str:
    return os.path.splitext(_parts(row.text)[-1])[0]


def _base_of(image: str, row: _Row, num_dropped: int) -> Path:
    """Returns the folder in which a row without its first ``num_dropped`` parts is the path of ``image``."""
    return Path(image).parents[len(_parts(row.text)) - num_dropped - 1]


def _paths_ending_in(tail: list[str], paths: list[str], *, has_suffix: bool) -> list[str]:
    """Returns the ``paths`` that end in the parts ``tail``, compared without suffixes unless ``has_suffix``."""
    ending = os.sep + os.path.join(*tail)
    if has_suffix:
        return [path for path in paths if path.endswith(ending)]
    return [path for path in paths if os.path.splitext(path)[0].endswith(ending)]


def _several_images(row: _Row, images: list[str], file: Path, root: Path) -> UserError:
    """Returns the error about a row that may name any of several ``images``."""
    shown = images if len(images) <= 2 else [*images[:2], "..."]
    return UserError(
        f"{file}:{row.line}: {len(images)} images fit {row.text[:200]!r}: {', '.join(shown)}; name images by "
        f"their paths relative to {root}"
    )


def _images_called_like(rows: list[_Row], file: Path, root: Path, suffixes: frozenset[str]) -> list[str]:
    """Returns the paths of the images in the data set that have the names of ``rows``, with or without suffix."""
    names = {_parts(row.text)[-1] for row in rows}
    voc_images = _voc_images(file)
    base = voc_images if voc_images.is_dir() else root  # elsewhere, VOC's masks have the same names
    if not base.is_dir():
        return []
    images = [entry for visit in walk(base) for entry in visit.entries if is_image(entry.name, suffixes)]
    return [entry.path for entry in images if entry.name in names or os.path.splitext(entry.name)[0] in names]


def _voc_images(file: Path) -> Path:
    """Returns the folder of the images that a list in VOC's ``ImageSets/Main`` names by their stems."""
    return file.parent.parent.parent / "JPEGImages"


def _name_in(row: _Row) -> str:
    return "/".join(_parts(row.text))


def _parts(row: str) -> list[str]:
    return [part for part in row.replace("\\", "/").split("/") if part not in ("", ".", "..")] or [row]
