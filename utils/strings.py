"""Text for messages (counts, lists, tables, durations), image ids, and compact storage for many strings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from utils.errors import look_alike

_MAX_ID_DIGITS = 18  # more digits may not fit into int64
_LISTED_RANKS = 8


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: ``1 image``, ``2,000 images``, ``2 boxes``, ``2 entries``. ``noun`` may include
    adjectives."""
    if count == 1:
        return f"{count:,} {noun}"
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy", "uy")):
        return f"{count:,} {noun[:-1]}ies"
    plural = "es" if noun.endswith(("s", "x", "sh", "tch")) else "s"
    return f"{count:,} {noun}{plural}"


def format_bytes(size: float) -> str:
    """Formats a number of bytes with a decimal unit up to GB."""
    for unit, digits in (("B", 0), ("kB", 0), ("MB", 1)):
        if size < 999.5:
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def listed(items: Sequence[str], max_items: int = 8) -> str:
    """Joins items for a message: ``a, b and 3 more``."""
    more = f" and {len(items) - max_items} more" if len(items) > max_items else ""
    return ", ".join(items[:max_items]) + more


def aligned(rows: Sequence[Sequence[str]], *, left: bool = False) -> list[str]:
    """Formats a table as lines with right-aligned, or ``left``-aligned, columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    pad = str.ljust if left else str.rjust
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def class_difference(names: Sequence[str], expected: Sequence[str]) -> str:
    """Describes the first difference between class names and the expected ones. Returns "" if there is none."""
    if len(names) != len(expected):
        return f"{counted(len(names), 'class')} against {len(expected)}"
    index = next((i for i, (a, b) in enumerate(zip(names, expected)) if a != b), None)
    if index is None:
        return ""
    if look_alike(names[index], expected[index]):
        return f"class {index} is {names[index]!a} against {expected[index]!a}, which look the same"
    return f"class {index} is '{names[index]}' against '{expected[index]}'"


def class_key(name: str) -> str:
    """Returns the key by which class names are compared, which ignores case and surrounding spaces."""
    return name.strip().lower()


def image_ids_of(stems: Sequence[str]) -> tuple[int, ...] | tuple[str, ...]:
    """Returns COCO image ids for file stems: integers if all stems are digits (``000000000139`` is image 139) and give
    distinct integers, else the stems themselves."""
    if all(stem.isascii() and stem.isdigit() and len(stem) <= _MAX_ID_DIGITS for stem in stems):
        numbers = tuple(map(int, stems))
        if len(set(numbers)) == len(numbers):
            return numbers
    return tuple(stems)


@dataclass(frozen=True, slots=True)
class FlatStrings:
    """An immutable sequence of strings in two arrays, so that the garbage collector has no elements to track. File
    names that are not UTF-8 are preserved (surrogateescape)."""

    data: np.ndarray  # uint8 (P,) UTF-8, one string after another
    offsets: np.ndarray  # int64 (N + 1,): string i is data[offsets[i]:offsets[i + 1]]

    @classmethod
    def of(cls, strings: Iterable[str]) -> FlatStrings:
        encoded = list(map(_encoded, strings))
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(e) for e in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> str:
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"{i} of {n} strings")
        i %= n
        return self.data[self.offsets[i] : self.offsets[i + 1]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair, from an escape in JSON; not a file name
        return text.encode("utf-8", "backslashreplace")


def format_duration(seconds: float) -> str:
    """Formats seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rank_list(ranks: Sequence[int]) -> str:
    """Lists ranks for a message: "rank 3", "ranks 0, 1 and 7 more"."""
    more = f" and {len(ranks) - _LISTED_RANKS} more" if len(ranks) > _LISTED_RANKS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks[:_LISTED_RANKS]))}{more}"
