from __future__ import annotations

import signal

from utils.process.child_signals import killed_by


def test_a_signal_is_described_by_its_name_and_what_may_have_caused_it():
    assert killed_by(40) == "killed by signal 40"
    assert killed_by(signal.SIGSEGV) == "killed by SIGSEGV"
    assert killed_by(signal.SIGKILL) == "killed by SIGKILL; is there enough memory?"
