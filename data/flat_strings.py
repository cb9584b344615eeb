"""Stores many strings compactly, in two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class FlatStrings:
    """An immutable sequence of strings in two arrays, so that the garbage collector has no elements to track. File
    names that are not UTF-8 are preserved (surrogateescape)."""

    data: np.ndarray  # uint8 (P,) UTF-8, one string after another
    offsets: np.ndarray  # int64 (N + 1,): string i is data[offsets[i]:offsets[i + 1]]

    @classmethod
    def of(cls, strings: Iterable[str]) -> FlatStrings:
        encoded = [text.encode("utf-8", "surrogateescape") for text in strings]
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
