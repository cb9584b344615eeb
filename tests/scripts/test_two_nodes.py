"""Two nodes as network namespaces: rendezvous, staging and training across them (benchmarks/two_nodes.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def can_make_namespaces() -> bool:
    name = f"lockstep-probe{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


@pytest.mark.slow
def test_two_nodes_equal_one_process():
    if not can_make_namespaces():
        pytest.skip("needs root and iproute2")
    command = [sys.executable, "-m", "benchmarks.two_nodes"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the weights of two nodes are those of one process" in done.stdout
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "lockstep" not in left
