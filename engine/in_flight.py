"""Host memory that a device still reads."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol


class Done(Protocol):
    """What is asked of an event, as `torch.cuda.Event` answers it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class InFlight:
    """Keeps objects until the device has read their memory. A copy that does not block returns before it is made, and
    whoever gives up its source meanwhile may find the next batch drawn into it."""

    def __init__(self) -> None:
        self._held: deque[tuple[Any, Done]] = deque()

    def hold(self, source: Any, done: Done) -> None:
        """``done``: recorded after the reading, on one and the same stream at all calls."""
        self._held.append((source, done))

    def release(self) -> None:
        """Gives up what has been read. Waits for nothing."""
        while self._held and self._held[0][1].query():
            self._held.popleft()

    def wait(self) -> None:
        """Until all has been read."""
        while self._held:
            self._held[0][1].synchronize()
            self._held.popleft()
