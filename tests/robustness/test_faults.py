"""File system faults during a training do not change its result (see faults.py for the comparison)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the shim needs Linux"),
    pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="the shim needs a C compiler"),
]


def run_faults(folder: Path, *options: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LOCKSTEP_TEST_FAULTS")}
    command = [sys.executable, str(Path(__file__).with_name("faults.py")), "--folder", str(folder), *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    count = options[options.index("--runs") + 1]
    assert f"{count} of {count} runs right" in ended.stdout


@pytest.mark.slow
def test_five_file_system_faults_do_not_change_the_result(tmp_path: Path):
    run_faults(tmp_path, "--runs", "5", "--seed", "1")


@pytest.mark.slow
def test_two_hundred_file_system_faults_do_not_change_the_result(tmp_path: Path):
    run_faults(tmp_path, "--runs", "200")
