"""Fixtures of the tests of the Python package."""

from __future__ import annotations

import pytest

from lockstep import command as command_module
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.lockstep.script_command import BEGINNING


@pytest.fixture(autouse=True)
def _preloaded(preloaded: None) -> None:
    """The commands that the package starts begin with torch imported."""


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Replaces the commands by a program; returns a function that sets its text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def replace(text: str) -> None:
        text = f"{BEGINNING}{text}"
        monkeypatch.setattr(command_module, "command_prefix", lambda name: [python(), "-c", text, name])

    return replace
