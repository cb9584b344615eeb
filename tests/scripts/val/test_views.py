"""val.py with several views and tiles: the same scores on any number of processes."""

from __future__ import annotations

import os

import pytest

import val
from tests.helpers.scripts import run_python
from tests.scripts.val.validation import flags, lasting


def error_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("- ")]


@pytest.mark.slow
def test_results_with_tta_are_equal_on_1_2_and_3_processes(tiny, tmp_path, capsys):
    more = ["--tta", "--conf-thres", "0.0001"]
    val.main(flags(tiny, tmp_path, "--name", "1", *more))
    printed = capsys.readouterr().out
    assert "does nothing" not in printed  # TTA needs NMS, but nobody asked for it
    one = tmp_path / "runs" / "1"
    for world in ("2", "3")[: len(os.sched_getaffinity(0)) - 1]:
        ended = run_python("val.py", *flags(tiny, tmp_path, "--name", world, *more), torchrun=int(world))
        assert ended.stdout.count("AP by size") == 1
        assert error_lines(ended.stdout) == error_lines(printed) != []
        other = tmp_path / "runs" / world
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
        assert lasting(one) == lasting(other)
        for name in ("predictions.json", "classes.csv", "sizes.csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
    assert lasting(one)["errors"]["kinds"]["missed"]["count"] <= 18
