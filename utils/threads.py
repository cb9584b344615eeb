"""Work on other threads: reading a bounded way ahead, and writing files while training goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(function: Callable[[T], R], items: Iterable[T], *, threads: int, ahead: int | None = None) -> Iterator[R]:
    """``map`` in ``threads`` threads, in order, at most ``ahead`` results (default: two a thread) waiting to be taken.

    An exception of ``function`` is raised where its result would have come.
    """
    threads = max(threads, 1)
    ahead = 2 * threads if ahead is None else ahead
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class BackgroundWriter:
    """Writes what is submitted, one file at a time, in order. Content that waits is replaced by newer content for the
    same path, so a slow disk costs checkpoints and no memory. An error is raised by the next call of this class."""

    def __init__(self, write: Callable[[Any, Path], None]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._waiting: dict[Path, Any] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, files: dict[Path, Any]) -> None:
        """Queues content by path; returns at once."""
        self.check()
        with self._changed:
            for path, content in files.items():
                self._waiting.pop(path, None)  # a path's place in the order is that of its newest content
                self._waiting[path] = content
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raises what went wrong in the thread since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Returns when nothing is waiting or being written, whether it went well or not."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def finish(self) -> None:
        """Waits, then raises what went wrong."""
        self.wait()
        self.check()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    self._waiting.clear()
                    self._thread = None
                    self._changed.notify_all()
                    return
                path = next(iter(self._waiting))
                content = self._waiting.pop(path)
            try:
                self._write(content, path)
            except BaseException as error:  # handed to the main thread, whatever it is
                self._error = error
            del content
