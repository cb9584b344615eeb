"""The number of images that are read ahead of the model."""

from __future__ import annotations

MAX_AHEAD_BYTES = 1 << 27


class ReadAheadLimit:
    """Caps how many images are read ahead: at most ``count``, at most `MAX_AHEAD_BYTES` together, and none before the
    size of the first is known."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._largest_bytes = 0

    def __call__(self) -> int:
        if not self._largest_bytes:
            return 0
        return min(self._count, MAX_AHEAD_BYTES // self._largest_bytes)

    def add(self, image_bytes: int) -> None:
        self._largest_bytes = max(self._largest_bytes, image_bytes)
