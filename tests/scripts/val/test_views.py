"""val.py with several views, and with box voting."""

from __future__ import annotations

import os

import pytest

import val
from engine.evaluation.analysis import KINDS
from tests.helpers.scripts import run_python
from tests.scripts.val.validation import flags, lasting


@pytest.mark.slow
def test_results_with_tta_are_equal_on_1_2_and_3_processes(tiny, tmp_path, capsys):
    more = ["--tta", "--conf-thres", "0.0001"]
    val.main(flags(tiny, tmp_path, "--name", "1", *more))
    printed = capsys.readouterr().out
    assert "does nothing" not in printed  # TTA needs NMS, but nobody asked for it
    for words in ("error at IoU 0.5", *KINDS, "all false positives"):
        assert words in printed
    one = tmp_path / "runs" / "1"
    for world in ("2", "3")[: len(os.sched_getaffinity(0)) - 1]:
        ended = run_python("val.py", *flags(tiny, tmp_path, "--name", world, *more), torchrun=int(world))
        assert ended.stdout.count("AP by size") == ended.stdout.count("error at IoU 0.5") == 1
        other = tmp_path / "runs" / world
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
        assert lasting(one) == lasting(other)
        for name in ("predictions.json", "classes.csv", "sizes.csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
    assert lasting(one)["errors"]["kinds"]["missed"]["count"] <= 18
