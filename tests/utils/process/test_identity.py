"""Detects whether another process has ended, as far as it can be observed from here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT
from utils.process.identity import has_died, this_process

PROGRAM = "from utils.process.identity import this_process; print(this_process(), flush=True); input()"


def test_a_process_has_died_when_it_has_ended_even_if_nobody_has_waited_for_it():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        identity = child.stdout.readline().strip()
        assert identity.partition(" ")[0] == str(child.pid)
        assert not has_died(identity)
        child.stdin.close()
        child.stdout.read()  # ends when the process closes its output, a moment before it is a zombie
        while not has_died(identity):
            assert child.returncode is None, "nobody has waited for it yet"
        child.wait()
        assert has_died(identity)


@pytest.mark.parametrize("place", ["another-node", "c2a5d4d8-boot/pid:[4026531836]"])
def test_a_process_of_another_machine_or_container_cannot_be_observed(place: str):
    own_pid, own_place = this_process().split()
    assert own_place != place
    assert not has_died(f"{own_pid} {place}")
    assert not has_died(f"{2**22 + 1} {place}")  # above the largest process id of Linux
    assert has_died(f"{2**22 + 1} {own_place}")
