"""The common parts of the benchmarks: alternation, tables, and what both sides are given and scored by."""

from __future__ import annotations

import pytest

from benchmarks.speed.compare import Comparison, Sides, our_command

pytestmark = pytest.mark.benchmarks


@pytest.mark.parametrize(("higher", "advantage"), [(True, 0.5), (False, 2.0)])
def test_the_ratio_is_of_medians_and_in_the_right_direction(higher, advantage):
    row = Comparison("x", "s", [9, 1, 2], [4, 400, 0.1], higher_is_better=higher)
    assert row.advantage == advantage
    assert row.cells()[-1] == f"{advantage:.2f}"
    assert Comparison("x", "s", [1.0]).advantage is None
    assert Comparison("AP", "", [0.0], [0.0], higher_is_better=higher).cells() == ["AP", "0", "0", "1.00"]


@pytest.mark.parametrize(("is_short", "searched"), [(False, 2), (True, 0)])
def test_our_side_times_the_step_of_a_long_run_unless_it_is_told_otherwise(is_short: bool, searched: int):
    """cuDNN then searches kernels for the timed batch size; 0: no search."""
    command = our_command("step", imgsz=32, device="cpu", steps=1, threads=1, amp="off", is_short=is_short)
    with Sides({"ours": command}) as sides:
        turn = sides.measure("ours", model="yolov8n", batch_size=2)
    assert turn["seconds"] > 0
    assert (turn["dtype"], turn["searched_batch"]) == ("float32", searched)
