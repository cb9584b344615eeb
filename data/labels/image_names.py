"""Which image an annotation file means: tools write URLs, quoted text, paths of other machines, and other cases.

Reading COCO JSON (`data.labels.coco`) and converting exports (`tools.convert`) follow this one rule.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from urllib.parse import unquote


def loose(name: str) -> str:
    """Returns what names have in common that differ only in case, or in how accents are composed."""
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def readings_of(name: str) -> list[tuple[str, ...]]:
    """Returns what ``name`` may stand for, as the parts of paths, the most literal reading first.

    Further readings are the file in a link of Label Studio (``/data/local-files/?d=a%5Cb.png``), a URL or path without
    its query, and each of them with ``%20`` and the like decoded.
    """
    texts = [name]
    before, _, query = name.partition("?")
    texts += [value for key, _, value in (pair.partition("=") for pair in query.split("&")) if key == "d"]
    if "://" in name:
        before = before.partition("#")[0]
    texts.append(before)
    texts += [unquote(text) for text in texts]
    readings = (_parts(text) for text in texts)
    return [parts for parts in dict.fromkeys(readings) if parts]


class ImageNames:
    """Finds images by the names that annotation files give them.

    ``names``: paths of the images with ``/``, of which as many folders are compared as necessary.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find(self, name: str) -> list[int]:
        """Returns the positions of the images that ``name`` fits best: none, one, or several if it is ambiguous.

        A file name that fits literally wins over one in another case or composition of accents, and that over one
        without its suffix. Several images of that file name are told apart by as many folders as it takes.
        """
        readings = readings_of(name)
        for is_stem in (False, True):
            for index, key in ((self._literal, str), (self._loose, loose)):
                for parts in readings:
                    if fits := index.get((is_stem, key(parts[-1]))):
                        return self._narrowed(fits, parts)
        return []

    def agreement(self, name: str, image: int) -> int:
        """Returns how many last folders of ``name`` and of an image are the same, for the reading with the most."""
        folders = [loose(part) for part in _parts(self._names[image])[:-1]]
        counts = []
        for parts in readings_of(name):
            pairs = zip(reversed(folders), map(loose, reversed(parts[:-1])))
            differs = [i for i, (ours, theirs) in enumerate(pairs) if ours != theirs]
            counts.append(differs[0] if differs else min(len(folders), len(parts) - 1))
        return max(counts)

    def same_stem(self, name: str) -> str:
        """Returns the name of an image that differs from ``name`` only in its suffix, for messages; "" if none does."""
        for parts in readings_of(name):
            if fits := self._loose.get((True, loose(os.path.splitext(parts[-1])[0]))):
                return self._names[fits[0]]
        return ""

    def _narrowed(self, fits: list[int], parts: tuple[str, ...]) -> list[int]:
        for kept in range(2, len(parts) + 1):
            if len(fits) <= 1:
                break
            tail = [loose(part) for part in parts[-kept:-1]]
            fits = [i for i in fits if [loose(part) for part in _parts(self._names[i])[-kept:-1]] == tail]
        return fits

    @cached_property
    def _literal(self) -> dict[tuple[bool, str], list[int]]:
        """Positions by whether the suffix is left out, and file name."""
        found: dict[tuple[bool, str], list[int]] = {}
        for i, name in enumerate(self._names):
            base = name.rpartition("/")[2]
            for key in ((False, base), (True, os.path.splitext(base)[0])):
                found.setdefault(key, []).append(i)
        return found

    @cached_property
    def _loose(self) -> dict[tuple[bool, str], list[int]]:
        found: dict[tuple[bool, str], list[int]] = {}
        for (is_stem, base), positions in self._literal.items():
            found.setdefault((is_stem, loose(base)), []).extend(positions)
        return found


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.replace("\\", "/").split("/") if part not in ("", ".", ".."))
