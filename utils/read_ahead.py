"""Threads that work a bounded way ahead of whoever uses what they make."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
