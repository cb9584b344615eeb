"""Writes files in a thread while training continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any


class BackgroundWriter:
    """Writes submitted files one by one, in order.

    Files that are submitted together are written together: newer content waits until the last of them is written. All
    waiting content then becomes one submission, in which newer content replaces older content of the same path: a slow
    disk skips checkpoints, but every file is still updated from time to time. An error drops all content that is not
    yet written, and the next `submit`, `check` or `flush` raises it.
    """

    def __init__(self, write: Callable[[Any, Path], None]) -> None:
        self._write = write
        self._pool = ThreadPoolExecutor(1, "checkpoint writer")
        self._calls: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._waiting: dict[Path, Any] = {}  # written together, next

    def submit(self, files: dict[Path, Any]) -> None:
        """Queues content by path; returns at once."""
        self.check()
        with self._lock:
            kept = {path: content for path, content in self._waiting.items() if path not in files}
            self._waiting = kept | files  # newer content comes last
        self._calls.append(self._pool.submit(self._write_waiting))

    def check(self) -> None:
        """Raises the thread's error since the last call, if any."""
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()

    @property
    def is_busy(self) -> bool:
        """True while anything is waiting or being written. May be read from any thread."""
        return not all(call.done() for call in tuple(self._calls))

    def wait(self) -> None:
        """Waits until nothing is waiting or being written, whether or not the writes succeeded."""
        wait(self._calls)

    def flush(self) -> None:
        """Waits until everything is written. Raises the error of the thread, if any."""
        self.wait()
        self.check()

    def _write_waiting(self) -> None:
        """Writes all files that wait; none if an earlier call has written them already."""
        with self._lock:
            files = self._waiting
            self._waiting = {}
        try:
            while files:
                path = next(iter(files))
                self._write(files.pop(path), path)
        except BaseException:
            with self._lock:
                self._waiting.clear()
            raise
