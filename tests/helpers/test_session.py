"""Files that are made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.session import session_file


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
