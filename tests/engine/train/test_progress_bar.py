"""The pace of the steps: the time left follows from the last minutes."""

from __future__ import annotations

import math

from engine.train.progress_bar import PACE_S, Pace


def paced(*seconds: float) -> Pace:
    pace = Pace()
    for step_s in seconds:
        pace.count(step_s)
    return pace


def test_the_pace_is_that_of_the_last_minutes_without_the_first_step():
    assert math.isnan(paced(30.0).step_s)
    assert paced(30.0, 1.0, 3.0).step_s == 2.0
    assert paced(30.0, *[1.0] * 500, *[2.0] * int(PACE_S / 2)).step_s == 2.0
