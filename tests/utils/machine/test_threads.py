from __future__ import annotations

import threading
import time

import pytest

from utils.machine.threads import iterate_ahead, map_ahead


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("ahead", [None, lambda: 0])
def test_a_map_keeps_the_order_and_is_never_further_ahead(threads, ahead):
    called: list[int] = []

    def square(number: int) -> int:
        called.append(number)
        time.sleep(0.002 * (number % 3))
        return number * number

    for number, result in enumerate(map_ahead(square, range(40), threads=threads, ahead=ahead)):
        assert result == number * number
        assert len(called) <= number + 1 + (2 * threads if ahead is None else ahead())
    assert sorted(called) == list(range(40))


def test_an_error_of_the_items_comes_after_the_results_before_it():
    """The items may pass through several stages."""

    def items():
        yield from range(5)
        raise OSError("damaged")

    first = map_ahead(lambda number: number + 1, items(), threads=2)
    second = map_ahead(lambda number: number * 10, first, threads=1)
    assert [next(second) for _ in range(5)] == [10, 20, 30, 40, 50]
    with pytest.raises(OSError, match="damaged"):
        next(second)


def test_an_iterator_is_computed_in_another_thread():
    threads = set()

    def items(count: int):
        try:
            for number in range(count):
                threads.add(threading.get_ident())
                yield None if number == 1 else number
            raise OSError("damaged")
        finally:
            threads.add("closed")

    found = iterate_ahead(items(3), lambda: 2)
    assert [next(found), next(found), next(found)] == [0, None, 2]
    with pytest.raises(OSError, match="damaged"):
        next(found)
    assert threading.get_ident() not in threads
    threads.clear()
    endless = iterate_ahead(items(1 << 30), lambda: 2)
    next(endless)
    del endless
    assert "closed" in threads
