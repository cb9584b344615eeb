"""Finds the image that an export names. Tools write URLs, percent-encoded text, paths of other machines, and names in
another case."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote

from utils.files.paths import casefold_nfc as loose

_LITERAL = re.compile(r"[\w./\\:-]*")  # names without encoded parts, queries and spaces


@lru_cache(maxsize=1)  # one name is looked up in several places in a row
def readings_of(name: str) -> tuple[tuple[str, ...], ...]:
    """Returns the possible readings of ``name`` as path parts, the most literal reading first.

    Further readings are the file in a Label Studio link (``/data/local-files/?d=a%5Cb.png``), a URL or path without its
    query, and each of these with ``%20`` and the like decoded or without outer spaces.
    """
    if _LITERAL.fullmatch(name):  # most names
        parts = _parts(name)
        return (parts,) if parts else ()
    paths = [name]
    without_query, _, query = name.partition("?")
    paths += [value for key, _, value in (pair.partition("=") for pair in query.split("&")) if key == "d"]
    if "://" in name:
        without_query = without_query.partition("#")[0]
    paths.append(without_query)
    paths += [unquote(path) for path in paths]
    paths += [path.strip() for path in paths]
    readings = (_parts(path) for path in dict.fromkeys(paths))
    return tuple([parts for parts in dict.fromkeys(readings) if parts])


def num_folders(name: str) -> int:
    """Counts the folders of ``name`` in its literal reading."""
    readings = readings_of(name)
    return len(readings[0]) - 1 if readings else 0


def common_folders(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the first folders that all ``names`` have in common, in their literal reading."""
    folders = {_parts(name)[:-1] for name in names}
    if not folders:
        return ()
    first = min(folders)
    last = max(folders)  # all others are between these two in order, and begin with what these have in common
    count = 0
    while count < min(len(first), len(last)) and first[count] == last[count]:
        count += 1
    return first[:count]


class ImageNames:
    """Finds images by the names that annotation files give them.

    ``names_of_images``: all names of each image, as symbolic links may give it several: paths with ``/``. As many
    folders are compared as necessary.
    """

    def __init__(self, names_of_images: Iterable[Sequence[str]]) -> None:
        self._names_of_images = list(names_of_images)
        self._names: list[str] = []
        self._image_of_name: list[int] = []  # by position in `_names`
        for image, names in enumerate(self._names_of_images):
            self._names += names
            self._image_of_name += [image] * len(names)
        self._groups: dict[tuple[bool, bool], dict[str, _NameGroup]] = {}  # by kind, see `_groups_of_names`

    @classmethod
    def of_single_names(cls, names: Iterable[str]) -> ImageNames:
        """Finds images of which each has one name."""
        return cls((name,) for name in names)

    def __len__(self) -> int:
        """Counts the images."""
        return len(self._names_of_images)

    def name(self, image: int) -> str:
        """Returns the usual name of an image."""
        return self._names_of_images[image][0]

    def find(self, name: str, outer_folders: Sequence[str] = ()) -> tuple[int, ...]:
        """Returns the numbers of the images that match ``name`` best: none, one, or several if it is ambiguous.

        If the part after the last slash is the file name of exactly one image, that image matches, whatever the folders
        (this is also the fast path). Otherwise, a literal match of the file name wins over one in another case or
        composition of accents, which wins over a match without suffix. Several images with the same file name are
        distinguished by as many folders as necessary. If only ``outer_folders`` (`common_folders` of all names, such as
        the path of the data set on another machine) are left, the image without further folders matches.
        """
        if not self._names:
            return ()
        usual = self._groups_of_names(is_stem=False, is_loose=False).get(name.rpartition("/")[2])
        usual_images = self._images_of(usual) if usual else ()
        if len(usual_images) == 1:
            return usual_images
        readings = readings_of(name)
        for is_stem in (False, True):
            for is_loose in (False, True):
                groups = self._groups_of_names(is_stem=is_stem, is_loose=is_loose)
                for parts in readings:
                    same_name = groups.get(loose(parts[-1]) if is_loose else parts[-1])
                    if same_name:
                        return self._narrowed(same_name, parts, outer_folders)
        return ()

    def agreement(self, name: str, image: int) -> int:
        """Returns the number of trailing folders that ``name``, in its best reading, has in common with an image, under
        the best of its names."""
        readings = readings_of(name)
        counts = [_agreement(_parts(own), parts) for own in self._names_of_images[image] for parts in readings]
        return max(counts, default=0)

    def same_stem(self, name: str) -> str:
        """Returns the name of an image with the file name ``name`` but another suffix, or "", for messages."""
        for parts in readings_of(name):
            same_stem = self._groups_of_names(is_stem=True, is_loose=True).get(loose(os.path.splitext(parts[-1])[0]))
            if same_stem:
                return self._names[same_stem.positions[0]]
        return ""

    def _narrowed(self, matches: _NameGroup, parts: tuple[str, ...], outer_folders: Sequence[str]) -> tuple[int, ...]:
        """Narrows ``matches`` to the names that agree with ``parts`` in as many folders as necessary, and returns their
        images. If none has the next folder and only outer folders are left, keeps the names without further folders. If
        the next folder belongs to the data set, another image is meant."""
        for kept in range(2, len(parts) + 1):
            if len(self._images_of(matches)) == 1:
                break
            groups = self._by_folder(matches, kept)
            closest = groups.get(loose(parts[-kept]))
            num_left = len(parts) - kept + 1
            if closest is None and kept > 2 and parts[:num_left] == tuple(outer_folders[:num_left]):
                closest = groups.get("")
            if closest is None:
                return ()
            matches = closest
        return self._images_of(matches)

    def _by_folder(self, group: _NameGroup, kept: int) -> dict[str, _NameGroup]:
        """Divides the names of a group, which agree in ``kept - 1`` last parts, by the folder before these: "" for
        names with fewer parts."""
        if group.by_folder is None:
            group.by_folder = {}
            for position in group.positions:
                parts = _parts(self._names[position])
                folder = loose(parts[-kept]) if len(parts) >= kept else ""
                group.by_folder.setdefault(folder, _NameGroup()).positions.append(position)
        return group.by_folder

    def _images_of(self, group: _NameGroup) -> tuple[int, ...]:
        """Returns the images of the names in a group, each once."""
        if group.images is None:
            group.images = tuple(dict.fromkeys([self._image_of_name[i] for i in group.positions]))
        return group.images

    def _groups_of_names(self, *, is_stem: bool, is_loose: bool) -> dict[str, _NameGroup]:
        """Returns all names by file name, without suffix if ``is_stem``, normalized if ``is_loose``."""
        kind = (is_stem, is_loose)
        if kind not in self._groups:
            groups: dict[str, _NameGroup] = {}
            for i, name in enumerate(self._names):
                base = name.rpartition("/")[2]
                if is_stem:
                    base = os.path.splitext(base)[0]
                groups.setdefault(loose(base) if is_loose else base, _NameGroup()).positions.append(i)
            self._groups[kind] = groups
        return self._groups[kind]


@dataclass(slots=True)
class _NameGroup:
    """Names that agree in their last parts, and what follows from them, computed when it is first needed.

    Dividing a group once, instead of comparing all its names with each name that is looked up, matters if all folders
    have files of the same names.
    """

    positions: list[int] = field(default_factory=list)  # in `ImageNames._names`
    images: tuple[int, ...] | None = None
    by_folder: dict[str, _NameGroup] | None = None


def _agreement(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the number of trailing folders that two paths, given as parts, have in common."""
    count = 0
    for ours, theirs in zip(reversed(first[:-1]), reversed(second[:-1])):
        if ours != theirs and loose(ours) != loose(theirs):
            break
        count += 1
    return count


def _parts(path: str) -> tuple[str, ...]:
    return tuple([part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")])
