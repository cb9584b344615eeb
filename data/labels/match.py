"""Finds the image of each entry of a COCO JSON.

An entry fits the image whose path ends with its file name, in whole folders:

    images: train/a/7.png, val/a/7.png, val/8.png
    "8.png", "val/8.png", "VAL/8.PNG"   val/8.png
    "train/a/7.png"                     train/a/7.png
    "7.png", "a/7.png"                  ambiguous
    "test/8.png", "9.png"               not found

The name is compared as written, then percent-decoded (``x%20y.png``), then both again without regard to case and
Unicode composition. The first of these four that fits any image counts, if it fits only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

import numpy as np

from utils.files.paths import casefold_nfc

NOT_FOUND = -1
AMBIGUOUS = -2


def match_entries(file_names: Sequence[str], images: Sequence[str]) -> np.ndarray:
    """Returns the image of each of E file names, int64 (E,): its position in ``images``, `NOT_FOUND` or `AMBIGUOUS`.

    ``images``: paths with ``/``. In file names, ``\\`` is also a separator, and ``.`` and ``..`` are left out.
    """
    ends = _Ends(images)
    return np.array([_match(name, ends) for name in file_names], np.int64)


def _match(file_name: str, ends: _Ends) -> int:
    names = [file_name]
    if "%" in file_name:
        names.append(unquote(file_name))
    for is_folded in (False, True):
        for name in names:
            image = ends.find(name, is_folded=is_folded)
            if image != NOT_FOUND:
                return image
    return NOT_FOUND


def name_parts(file_name: str) -> list[str]:
    """Returns the folders and the name in a file name."""
    return [part for part in file_name.replace("\\", "/").split("/") if part not in ("", ".", "..")]


class _Ends:
    """Finds images by the last parts of their paths. For each number of parts, a table is made when it is needed."""

    def __init__(self, images: Sequence[str]) -> None:
        self._images = images
        self._tables: dict[tuple[int, bool], dict[str, int]] = {}

    def find(self, name: str, *, is_folded: bool) -> int:
        parts = name_parts(name)
        if not parts:
            return NOT_FOUND
        key = "/".join(parts)
        return self._table(len(parts), is_folded).get(casefold_nfc(key) if is_folded else key, NOT_FOUND)

    def _table(self, num_parts: int, is_folded: bool) -> dict[str, int]:
        if (num_parts, is_folded) not in self._tables:
            table: dict[str, int] = {}
            for number, image in enumerate(self._images):
                parts = image.rsplit("/", num_parts)
                if len(parts) < num_parts:
                    continue
                end = "/".join(parts[-num_parts:])
                if is_folded:
                    end = casefold_nfc(end)
                table[end] = AMBIGUOUS if end in table else number
            self._tables[num_parts, is_folded] = table
        return self._tables[num_parts, is_folded]
