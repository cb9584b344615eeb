"""Writes files in a thread while training continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any


class BackgroundWriter:
    """Writes submitted files one at a time, in order. Newer content for a path replaces pending content: a slow disk
    skips checkpoints. An error drops what is pending, and is raised by the next call of a method."""

    def __init__(self, write: Callable[[Any, Path], None]) -> None:
        self._write = write
        self._pool = ThreadPoolExecutor(1, "checkpoint writer")
        self._calls: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._pending: dict[Path, Any] = {}

    def submit(self, files: dict[Path, Any]) -> None:
        """Queues content by path; returns at once."""
        self.check()
        with self._lock:
            for path, content in files.items():
                self._pending.pop(path, None)  # newer content is queued last
                self._pending[path] = content
        self._calls += [self._pool.submit(self._write_next) for _ in files]

    def check(self) -> None:
        """Raises the error that the thread has had since the last call, if any."""
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()

    @property
    def is_busy(self) -> bool:
        """True while anything is pending or being written. Any thread may ask."""
        return not all(call.done() for call in tuple(self._calls))

    def wait(self) -> None:
        """Returns when nothing is pending or being written, successful or not."""
        wait(self._calls)

    def finish(self) -> None:
        self.wait()
        self.check()

    def _write_next(self) -> None:
        with self._lock:
            if not self._pending:  # newer content has replaced some
                return
            path = next(iter(self._pending))
            content = self._pending.pop(path)
        try:
            self._write(content, path)
        except BaseException:
            with self._lock:
                self._pending.clear()
            raise
