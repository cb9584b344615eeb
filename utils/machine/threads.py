"""Runs work in other threads: a bounded parallel map, and writing files while training continues."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
AHEAD_BYTES = 1 << 27


class _End(Enum):
    """Marks the end of an iterator."""

    END = 0


class ReadAheadLimit:
    """Limits how many images one stage of work may be ahead of the next: ``count``, or fewer if these would take more
    than `AHEAD_BYTES`; none before the first image."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._largest_bytes = 0

    def __call__(self) -> int:
        if not self._largest_bytes:
            return 0
        return min(self._count, AHEAD_BYTES // self._largest_bytes)

    def add(self, image_bytes: int) -> None:
        self._largest_bytes = max(self._largest_bytes, image_bytes)


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], *, threads: int, ahead: Callable[[], int] | None = None
) -> Generator[R, None, None]:
    """Maps in ``threads`` threads, in order, with at most ``ahead()`` pending results (default: two per thread).

    If ``function`` raises an exception, it is raised in place of the result, and no call for a later item starts: a
    file is not continued behind a part that could not be written. If ``items`` raises one, it is raised after the
    results of the items before it.
    """
    threads = max(threads, 1)
    waiting: deque[Future[R]] = deque()
    failed: list[int] = []  # numbers of the items whose calls have raised
    error: Exception | None = None

    def call(number: int, item: T) -> R:
        if failed and number > min(failed):  # an earlier one may still start, as another thread was faster
            raise CancelledError
        try:
            return function(item)
        except BaseException:
            failed.append(number)
            raise

    pool = ThreadPoolExecutor(threads)
    try:
        numbered = enumerate(items)
        while not failed:
            try:
                number, item = next(numbered)
            except StopIteration:
                break
            except Exception as raised:
                error = raised
                break
            waiting.append(pool.submit(call, number, item))
            while len(waiting) > (2 * threads if ahead is None else ahead()):
                yield waiting.popleft().result()
        while waiting:  # of a call that has failed, the result is its exception; it comes before cancelled ones
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
    if error is not None:
        raise error


def iterate_ahead(items: Generator[T, None, None], ahead: Callable[[], int]) -> Generator[T, None, None]:
    """Yields ``items``, which another thread computes, with at most ``ahead()`` pending ones. Closes them at the
    end."""
    computed = map_ahead(lambda _: next(items, _End.END), itertools.repeat(None), threads=1, ahead=ahead)
    with contextlib.closing(items), contextlib.closing(computed):
        for item in computed:
            if item is _End.END:
                return
            yield item


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
        """Whether anything is pending or being written. Any thread may ask."""
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
