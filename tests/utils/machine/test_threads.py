from __future__ import annotations

import time

import pytest

from utils.machine.threads import map_ahead


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
