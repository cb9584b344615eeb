"""SIGKILL at random moments changes nothing (tests/kills.py says what is compared)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import prove


def test_ten_kills(tmp_path: Path):
    """On one rank and on two."""
    prove(tmp_path, kills=10, worlds=[1, 1, 2], seed=1)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path):
    """The number of ranks is drawn anew at every resume."""
    prove(tmp_path, kills=100, worlds=[1, 2, 4], seed=2)
