"""Maps functions in threads, in order and with bounded memory."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class _End(Enum):
    """Marks the end of an iterator."""

    END = 0


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], *, threads: int, ahead: Callable[[], int] | None = None
) -> Generator[R, None, None]:
    """Maps in ``threads`` threads, in order, with at most ``ahead()`` pending results (default: two per thread).

    If ``function`` raises an exception, it is raised in place of the result, and no call for a later item starts, so
    that a file is not continued after a part that could not be written. If ``items`` raises an exception, it is raised
    after the results of the items before it.

    A caller that may stop early must close the generator: garbage collection would end its threads at any point of any
    thread, which can deadlock.
    """
    threads = max(threads, 1)
    failed: list[int] = []  # numbers of the calls that have raised

    def call(number: int, item: T) -> R:
        if failed and number > min(failed):  # an earlier call may still start
            raise CancelledError
        try:
            return function(item)
        except BaseException:
            failed.append(number)
            raise

    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    error_of_items: Exception | None = None
    numbered = enumerate(items)
    try:
        while not failed:
            try:
                number, item = next(numbered)
            except StopIteration:
                break
            except Exception as error:
                error_of_items = error
                break
            waiting.append(pool.submit(call, number, item))
            while len(waiting) > (2 * threads if ahead is None else ahead()):
                yield waiting.popleft().result()
        while waiting:  # a failed call raises its exception here, before any cancelled ones
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
    if error_of_items is not None:
        raise error_of_items


def iterate_ahead(items: Generator[T, None, None], ahead: Callable[[], int]) -> Generator[T, None, None]:
    """Yields ``items``, computed by another thread with at most ``ahead()`` pending ones. Closes the generator at the
    end."""
    computed = map_ahead(lambda _: next(items, _End.END), itertools.repeat(None), threads=1, ahead=ahead)
    with contextlib.closing(items), contextlib.closing(computed):
        for item in computed:
            if item is _End.END:
                return
            yield item
