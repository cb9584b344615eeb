from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.process.child_signals import killed_by
from utils.process.identity import has_died, this_process

ROOT = Path(__file__).parents[3]
PARENT = """
import signal, subprocess, time
from utils.process.child_signals import end_with_parent
child = subprocess.Popen(["sleep", "300"], preexec_fn=end_with_parent(signal.SIGTERM))
print(child.pid, flush=True)
time.sleep(300)
"""


def test_a_signal_is_described_by_its_name_and_what_may_have_caused_it():
    assert killed_by(40) == "killed by signal 40"
    assert killed_by(signal.SIGSEGV) == "killed by SIGSEGV"
    assert killed_by(signal.SIGKILL) == "killed by SIGKILL; is there enough memory?"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux's")
def test_a_child_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        place = this_process().split()[1]
        child = f"{parent.stdout.readline().strip()} {place}"
        assert not has_died(child)
        parent.kill()
        deadline = time.monotonic() + 60
        while not has_died(child):
            assert time.monotonic() < deadline, "the child still runs"
            time.sleep(0.01)
