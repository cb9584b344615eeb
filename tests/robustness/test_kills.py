"""SIGKILL at random moments does not change the result (see tests/robustness/kills.py for the comparison)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.kills import prove, prove_phases


@pytest.mark.slow
def test_six_kills_do_not_change_the_result(tmp_path: Path):
    """On one rank and on two."""
    prove(tmp_path, kills=6, worlds=[1, 1, 2], seed=1)


@pytest.mark.slow
def test_a_hundred_kills_do_not_change_the_result(tmp_path: Path):
    """The number of ranks is drawn again at every resume."""
    prove(tmp_path, kills=100, worlds=[1, 2, 4], seed=2)


def test_a_kill_in_each_of_three_phases_does_not_change_the_result(tmp_path: Path):
    """Two ranks are killed while they scan, fill the memory cache and write checkpoints. tests/data/cache/test_open.py
    has a kill while a disk cache is filled."""
    phases = ("scan", "ram", "write")
    assert prove_phases(tmp_path, kills=1, seed=1, rounds={"ram": phases}).keys() == set(phases)


@pytest.mark.slow
def test_twenty_kills_in_every_phase_do_not_change_the_result(tmp_path: Path):
    assert min(prove_phases(tmp_path, kills=20, seed=2).values()) >= 20
