"""A process that fails ends its benchmark with the end of its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.processes import run_process

pytestmark = pytest.mark.benchmarks


def test_a_process_has_its_folder_and_variables_and_its_errors_are_shown(tmp_path: Path):
    run_process(["sh", "-c", 'echo "$NAME" > file'], folder=tmp_path, variables={"NAME": "value"})
    assert (tmp_path / "file").read_text() == "value\n"
    with pytest.raises(SystemExit, match="ended with 3:\nthe reason"):
        run_process(["sh", "-c", "echo the reason >&2; exit 3"])
