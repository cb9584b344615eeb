"""When to save inside an epoch."""

from __future__ import annotations

import time


class SaveCadence:
    """By steps, which every rank counts alike, and by the clock of one rank, which asks the others (`Asks.save`).

    Args:
        minutes: between saves by the clock; 0: never.
        steps: between saves by steps; 0: never.
        has_clock: True on the rank whose clock counts.
        at_start: save before the first step too, because the run goes on from another file than its last.pt.
    """

    def __init__(self, *, minutes: float, steps: int, has_clock: bool, at_start: bool = False) -> None:
        self.at_start = at_start
        self._seconds, self._steps = minutes * 60 if has_clock else 0.0, steps
        self._saved_at, self._has_asked = time.monotonic(), False

    def wants_save(self) -> bool:
        """Whether this rank should ask for a save with the step that begins: once, until it is done."""
        if not self._seconds or self._has_asked:
            return False
        self._has_asked = time.monotonic() - self._saved_at >= self._seconds
        return self._has_asked

    def due_after(self, updates: int) -> bool:
        """Whether the steps taken alone make a save due."""
        return self._steps > 0 and updates % self._steps == 0

    def saved(self) -> None:
        self._saved_at, self._has_asked = time.monotonic(), False
