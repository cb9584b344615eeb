"""Any file content ends with a line that names the file, or has no effect (see fuzz.py for what is tried)."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from tests.robustness.fuzz import TARGETS, fuzz
from tests.robustness.fuzzing.targets.case import Case, Target


def check(folder: Path, *, seconds: float, seed: int, min_inputs: int, max_inputs: float = math.inf) -> None:
    tally = fuzz(seconds=seconds, max_inputs=max_inputs, seed=seed, folder=folder)
    assert not tally.findings, tally.text() + "\n" + "\n".join(tally.findings)[:5000]
    assert tally.inputs.keys() == TARGETS.keys()
    assert tally.inputs.total() >= min_inputs, tally.text()


def test_a_hundred_inputs_find_nothing(tmp_path: Path):
    """The same inputs in every run, of every target, even on a slow machine."""
    check(tmp_path, seconds=120, seed=0, min_inputs=100, max_inputs=100)


@pytest.mark.slow
def test_ten_minutes_of_fuzzing_find_nothing(tmp_path: Path):
    check(tmp_path, seconds=600, seed=1, min_inputs=2000)


def test_a_finding_is_stored_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The fuzzer detects a traceback, a hang and a dying process, and continues."""

    def run(case: Case) -> str:
        (case.folder / "changed.txt").write_text("x")
        kind = case.rng.choice(("traceback", "hang", "death", "right", "right"))
        if kind == "traceback":
            raise ZeroDivisionError("a bug")
        if kind == "hang":
            time.sleep(60)
        if kind == "death":
            os._exit(3)
        return "right"

    monkeypatch.setitem(TARGETS, "recipe", Target(run, deadline_s=0.5))
    tally = fuzz(seconds=60, max_inputs=14, seed=0, names=["recipe"], folder=tmp_path)
    text = "\n".join(tally.findings)
    assert "ZeroDivisionError: a bug" in text
    assert "no end after 0.5 s" in text
    assert "the process died: exit status 3" in text
    assert tally.verdicts["recipe", "right"] > 0
    name = tally.findings[0].split(": ")[0].replace(":", "-")
    assert (tmp_path / name / "changed.txt").read_text() == "x"
