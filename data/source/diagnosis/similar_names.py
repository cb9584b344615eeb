"""Finds images whose names resemble the name of a label file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from data.images.kinds import IMAGE_SUFFIXES, UNREAD_SUFFIXES, is_image
from data.labels.image_names import loose
from data.source.listing.listing import ImageStatus, ListedImage
from data.source.walk import Folders


def loose_stem(name: str) -> str:
    """Returns the `loose` name of a file without its suffix."""
    return loose(os.path.splitext(name)[0])


class UnlabeledImages:
    """Finds images without a label file by names that resemble theirs. Its tables are built on first use."""

    def __init__(self, images: Iterable[ListedImage]) -> None:
        self._images = images

    @cached_property
    def _by_stem(self) -> dict[str, list[ListedImage]]:
        images: dict[str, list[ListedImage]] = {}
        for image in self._images:
            if image.status is ImageStatus.BACKGROUND:
                images.setdefault(loose_stem(image.file.base_name), []).append(image)
        return images

    @cached_property
    def _by_stem_without_punctuation(self) -> dict[str, list[ListedImage]]:
        images: dict[str, list[ListedImage]] = {}
        for stem, of_stem in self._by_stem.items():
            images.setdefault(_without_punctuation(stem), []).extend(of_stem)
        return images

    @cached_property
    def _by_part(self) -> dict[str, list[ListedImage]]:
        images: dict[str, list[ListedImage]] = {}
        for stem, of_stem in self._by_stem.items():
            for part in _beginnings_and_ends(stem):
                images.setdefault(part, []).extend(of_stem)
        return images

    @property
    def is_empty(self) -> bool:
        return not self._by_stem

    def named(self, stem: str) -> list[ListedImage]:
        """Returns the images whose loose stem is ``stem``."""
        return self._by_stem.get(stem, [])

    def resembling(self, stem: str) -> list[ListedImage]:
        """Returns the images whose loose stem is ``stem``. Without one, returns the only image whose stem differs in
        punctuation or leading zeros, or begins or ends with ``stem`` or vice versa."""
        if stem in self._by_stem:
            return self._by_stem[stem]
        similar = {*self._by_part.get(stem, ()), *self._by_stem_without_punctuation.get(_without_punctuation(stem), ())}
        for part in _beginnings_and_ends(stem):
            similar.update(self._by_stem.get(part, ()))
        return list(similar) if len(similar) == 1 else []


class ImagesOnDisk:
    """Finds images in folders by their loose names, including images of no split and of unsupported kinds."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._names: dict[str, dict[str, str]] = {}  # by folder, and by loose stem or loose name

    def names_in(self, folder: str) -> dict[str, str]:
        """Returns the names of all images in a folder (absolute), by loose stem and by loose name."""
        if folder not in self._names:
            names = [name for name in self._folders.entries(folder) if is_image(name, IMAGE_SUFFIXES | UNREAD_SUFFIXES)]
            by_name = {loose(name): name for name in names}
            by_stem = {loose_stem(name): name for name in names}
            self._names[folder] = by_name | by_stem
        return self._names[folder]

    def find(self, stems: Sequence[str], folders: Sequence[str]) -> list[str]:
        """Returns the names, relative to the data set's folder, of the images in ``folders`` that have the first of
        ``stems`` (loose stems or loose names) that any image has."""
        for stem in stems:
            matches = [(folder, self.names_in(folder).get(stem)) for folder in folders]
            names = [self._folders.name_in(folder) + name for folder, name in matches if name is not None]
            if names:
                return names
        return []


def _beginnings_and_ends(stem: str) -> set[str]:
    """Returns the beginnings and ends of a name, cut at punctuation: ``0000`` and ``7436`` for ``0000_7436``."""
    cuts = [i for i, character in enumerate(stem) if not character.isalnum()]
    beginnings = {stem[:i] for i in cuts}
    ends = {stem[i + 1 :] for i in cuts}
    return beginnings | (ends - {""})


def _without_punctuation(stem: str) -> str:
    """Normalizes punctuation and leading zeros, so that ``img-007`` and ``img 7`` are equal."""
    return re.sub(r"0+(?=\d)", "", re.sub(r"[\W_]+", "_", stem))
