"""Work in other threads: a bounded parallel map, and writing files while training continues."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
AHEAD_BYTES = 1 << 27


class Ahead:
    """How many images one stage of work may be ahead of the next: ``count``, or fewer if they are so large that they
    take `AHEAD_BYTES`; none before the first one."""

    def __init__(self, count: int) -> None:
        self._count, self._largest = count, 0

    def __call__(self) -> int:
        return min(self._count, AHEAD_BYTES // self._largest) if self._largest else 0

    def add(self, image_bytes: int) -> None:
        self._largest = max(self._largest, image_bytes)


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], *, threads: int, ahead: Callable[[], int] | None = None
) -> Iterator[R]:
    """``map`` in ``threads`` threads, in order, with at most ``ahead()`` pending results (default: two per thread).

    If ``function`` raises an exception, it is raised in place of the result, and no call for a later item begins.
    """
    threads = max(threads, 1)
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    last = math.inf

    def call(number: int, item: T) -> R | None:
        nonlocal last
        if number > last:
            return None  # which nobody takes
        try:
            return function(item)
        except BaseException:
            last = min(last, number)
            raise

    try:
        for number, item in enumerate(items):
            waiting.append(pool.submit(call, number, item))
            while len(waiting) > (2 * threads if ahead is None else ahead()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def iterate_ahead(items: Iterator[T], ahead: Callable[[], int]) -> Iterator[T]:
    """``items``, computed in another thread, with at most ``ahead()`` pending ones."""
    end = object()
    found = map_ahead(lambda _: next(items, end), itertools.repeat(None), threads=1, ahead=ahead)
    return itertools.takewhile(lambda item: item is not end, found)


class BackgroundWriter:
    """Writes submitted files one at a time, in order. Newer content for a path replaces pending content: a slow disk
    skips checkpoints. An error is raised by the next call of a method."""

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
                self._waiting.pop(path, None)  # newer content is queued last
                self._waiting[path] = content
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raises the error that the thread has had since the last call, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Returns when nothing is pending or being written, successful or not."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def finish(self) -> None:
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
