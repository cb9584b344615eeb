"""Files that are made once per session."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import session
from tests.helpers.session import keep_files_in_memory, open_session_folder, session_file


def test_the_files_of_a_failed_writer_are_not_handed_out(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TEST_SESSION", str(tmp_path))
    calls = []

    def write(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        (folder / f"{len(calls)}").touch()
        if len(calls) == 1:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        session_file("exports", write)
    for _ in range(2):
        assert [file.name for file in session_file("exports", write).iterdir()] == ["2"]
    assert len(calls) == 2


def test_a_single_file_is_made_again_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_TEST_SESSION", str(tmp_path))

    def fail(file: Path) -> None:
        file.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session_file("a.onnx", fail)
    assert session_file("a.onnx", lambda file: file.write_text("whole")).read_text() == "whole"


@pytest.mark.parametrize(
    ("free_gb", "flags", "variables", "is_used"),
    [
        (8, 0, {}, True),
        (1, 0, {}, False),
        (8, os.ST_NOEXEC, {}, False),  # Docker's --shm-size=8g: tests write programs and run them
        (8, 0, {"TMPDIR": "/tmp"}, False),
    ],
)
def test_files_are_kept_in_memory_where_all_tests_can_run(tmp_path, monkeypatch, free_gb, flags, variables, is_used):
    memory = SimpleNamespace(f_flag=flags, f_frsize=1 << 30, f_blocks=16, f_bfree=free_gb, f_bavail=free_gb)
    monkeypatch.setattr(session, "_MEMORY", str(tmp_path))
    environment = dict(variables)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", environment)
        patch.setattr(os, "statvfs", lambda path: memory)
        keep_files_in_memory()
    assert environment.get("PYTEST_DEBUG_TEMPROOT") == (str(tmp_path) if is_used else None)


@pytest.mark.parametrize(("root", "is_here"), [(".", True), ("", False)])
def test_the_session_folder_is_found_from_any_working_folder(tmp_path, monkeypatch, root, is_here):
    """As pytest reads PYTEST_DEBUG_TEMPROOT, an empty value stands for the usual folder."""
    monkeypatch.delenv("LOCKSTEP_TEST_SESSION")
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", root)
    with open_session_folder() as folder:
        assert folder.is_absolute()
        assert (folder.parent == tmp_path) == is_here
