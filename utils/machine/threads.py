"""Maps functions in threads, in order and with bounded memory."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from enum import Enum
from typing import Generic, TypeVar

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
    calls = _OrderedCalls(function, threads)
    waiting: deque[Future[R]] = deque()
    error_of_items: Exception | None = None
    remaining = iter(items)
    with calls:
        while not calls.have_failed:
            try:
                item = next(remaining)
            except StopIteration:
                break
            except Exception as error:
                error_of_items = error
                break
            waiting.append(calls.submit(item))
            while len(waiting) > (2 * threads if ahead is None else ahead()):
                yield waiting.popleft().result()
        while waiting:  # a failed call raises its exception here, before any cancelled ones
            yield waiting.popleft().result()
    if error_of_items is not None:
        raise error_of_items


class _OrderedCalls(Generic[T, R]):
    """Calls a function in threads. Once a call has raised, no later call starts. At the end of the block, calls that
    have not started are cancelled."""

    def __init__(self, function: Callable[[T], R], threads: int) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(threads)
        self._num_submitted = 0
        self._failed: list[int] = []  # numbers of the calls that raised

    def __enter__(self) -> _OrderedCalls[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def have_failed(self) -> bool:
        return bool(self._failed)

    def submit(self, item: T) -> Future[R]:
        number = self._num_submitted
        self._num_submitted += 1
        return self._pool.submit(self._call, number, item)

    def _call(self, number: int, item: T) -> R:
        if self._failed and number > min(self._failed):  # an earlier call may still start
            raise CancelledError
        try:
            return self._function(item)
        except BaseException:
            self._failed.append(number)
            raise


def iterate_ahead(items: Generator[T, None, None], ahead: Callable[[], int]) -> Generator[T, None, None]:
    """Yields ``items``, computed by another thread with at most ``ahead()`` pending ones. Closes the generator at the
    end."""
    computed = map_ahead(lambda _: next(items, _End.END), itertools.repeat(None), threads=1, ahead=ahead)
    with contextlib.closing(items), contextlib.closing(computed):
        for item in computed:
            if item is _End.END:
                return
            yield item
