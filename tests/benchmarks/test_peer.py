"""The peer's Python is found, or refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peer import find_peer
from utils.errors import UserError

pytestmark = pytest.mark.benchmarks


def write_peer(path: Path, *, exit_code: int = 0) -> str:
    """Writes a stand-in for the peer's Python, which says with its exit code whether it has Ultralytics."""
    path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_of_path_becomes_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_peer(tmp_path / "peers-python")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_peer("peers-python") == str(tmp_path / "peers-python")
    monkeypatch.chdir(tmp_path)
    assert find_peer("./peers-python") == str(tmp_path / "peers-python")
    assert find_peer("") == ""


def test_a_missing_python_and_one_without_ultralytics_are_refused(tmp_path: Path):
    write_peer(tmp_path / "other", exit_code=1)
    (tmp_path / "broken").write_text("#!/no/such/program\n")
    (tmp_path / "broken").chmod(0o755)
    for name, message in (("none", "no such program"), ("other", "has no Ultralytics"), ("broken", "be started")):
        with pytest.raises(UserError, match=message):
            find_peer(str(tmp_path / name))
