"""Standard streams that ignore errors otherwise behave like Python's own."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from tests.helpers.repository import ROOT

WAIT = """
import sys
from utils.process.standard_streams import tolerate_broken_streams
tolerate_broken_streams()
print("no line end", end="")
sys.stdin.readline()
print(", the end")
"""


def test_what_an_unbuffered_process_prints_is_shown_at_once():
    """Containers set PYTHONUNBUFFERED so that their log shows where a process is."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    with process:
        is_shown, _, _ = select.select([process.stdout], [], [], 30)
        assert is_shown, "nothing before the process goes on"
        assert os.read(process.stdout.fileno(), 100) == b"no line end"
        rest, _ = process.communicate(b"\n", timeout=60)
    assert rest == b", the end\n"
    assert process.returncode == 0
