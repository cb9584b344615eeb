from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.repository import ROOT
from utils.machine.limits import cause_of
from utils.process.child import RunResult
from utils.process.child_signals import killed_by
from utils.process.identity import has_died, this_process
from utils.process.outcome import Outcome, outcome_of
from utils.process.spawn import failure_of

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


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (signal.SIGSEGV, Outcome.REFUSED, Outcome.FAILED),
        (signal.SIGFPE, Outcome.REFUSED, Outcome.FAILED),
        (signal.SIGBUS, Outcome.LOST, Outcome.LOST),
        (signal.SIGABRT, Outcome.LOST, Outcome.LOST),
        (signal.SIGKILL, Outcome.LOST, Outcome.LOST),
        (signal.SIGHUP, Outcome.LOST, Outcome.LOST),
    ],
)
def test_a_signal_has_the_same_outcome_with_and_without_spawn(number, before, after):
    for has_begun, outcome in ((False, before), (True, after)):
        assert RunResult.of(-number, {"begun": has_begun}).outcome == outcome
        spawned = cause_of(failure_of(-number, "process 1 of 2"))
        assert outcome_of(spawned, has_begun=has_begun) == outcome


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
