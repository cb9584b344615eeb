"""The pace of the steps: the time left follows from the last minutes, and a slow machine is said once."""

from __future__ import annotations

import math

from engine.train.progress_bar import PACE_S, Pace
from utils.machine.resources import busy_machine


def paced(*seconds: float) -> tuple[Pace, list[str]]:
    pace = Pace()
    messages = []
    for step_s in seconds:
        pace.count(step_s)
        messages.append(pace.slowdown())
    return pace, [message for message in messages if message]


def test_the_pace_is_that_of_the_last_minutes_without_the_first_step():
    assert math.isnan(paced(30.0)[0].step_s)
    assert paced(30.0, 1.0, 3.0)[0].step_s == 2.0
    pace, _ = paced(30.0, *[1.0] * 500, *[2.0] * int(PACE_S / 2))
    assert pace.step_s == 2.0


def test_steps_that_take_several_times_the_first_ones_are_said_once():
    pace, messages = paced(30.0, *[1.0] * 100, *[4.0] * 100)
    assert len(messages) == 1
    assert "times as long as the first ones" in messages[0]
    assert pace.slowdown() == ""
    assert paced(*[1.0] * 100, *[2.5] * 300)[1] == []


def test_a_busy_machine_is_one_with_several_processes_a_core(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (7.9, 0.0, 0.0))
    assert busy_machine() == ""
    monkeypatch.setattr("os.getloadavg", lambda: (9.5, 0.0, 0.0))
    assert busy_machine() == "the machine is busy (9.5 processes want its 4 cores)"
