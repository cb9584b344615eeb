"""The watchdog in processes of its own: it ends them."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.helpers.preloaded import python
from tests.helpers.processes import ROOT

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
import engine.parallel.watchdog as watchdog
from utils.machine.stop_signals import StopSignals
from utils.machine.processes import this_process
from utils.errors import Stopped

watchdog.CHECK_EVERY_S, watchdog.PEER_DEAD_S, watchdog.STOP_TIMEOUT_S = 0.02, 0.2, 0.2
"""


def exit_code_of(program: str) -> int:
    code = PRELUDE + textwrap.dedent(program)
    return subprocess.run([python(), "-c", code], cwd=ROOT, timeout=60).returncode


@pytest.mark.parametrize(("agreed", "code"), [(True, 0), (False, 75)])
def test_a_checkpoint_may_take_long_once_the_ranks_have_agreed_to_stop(agreed, code):
    program = f"""
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog, signals.deferred():
        with dog.training(Path(".")):
            os.kill(os.getpid(), signal.SIGTERM)
            if {agreed}:
                dog.stop_agreed()
            time.sleep(1)  # the checkpoint is written
    """
    assert exit_code_of(program) == code


def test_a_process_ends_after_the_write_of_its_checkpoint():
    """The signal would end it after 0.2 s; the write takes a second."""
    program = """
    end = time.monotonic() + 1
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog, signals.deferred():
        with dog.training(Path("."), is_writing=lambda: time.monotonic() < end):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.9)
            dog.stop_agreed()
    """
    assert exit_code_of(program) == 0


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_stop_in_a_long_step_is_one_line_that_says_how_to_continue(tmp_path, has_checkpoint):
    """Such as the first step of --compile, which takes minutes."""
    if has_checkpoint:
        (tmp_path / "last.pt").touch()
    program = f"""
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog, signals.deferred():
        with dog.training(Path({str(tmp_path)!r})):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
    """
    done = subprocess.run(
        [python(), "-c", PRELUDE + textwrap.dedent(program)], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    more = f"; continue with: --resume {tmp_path / 'last.pt'}" if has_checkpoint else ""
    assert done.stdout + done.stderr == (
        f"error: stopped by a signal, but the step does not end; no new checkpoint{more}\n"
    )
    assert done.returncode == 75


@pytest.mark.parametrize(("error", "code"), [("Stopped(75)", 75), ("ValueError()", 2)])
def test_an_orderly_stop_is_not_cut_short_when_another_rank_has_ended(error, code):
    program = f"""
    peer = subprocess.Popen([sys.executable, "-c", ""])
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog:
        dog._peers = {{1: this_process().replace(str(os.getpid()), str(peer.pid), 1)}}
        try:
            with dog.training(Path(".")):
                raise {error}
        except (Stopped, ValueError):
            peer.wait()
            time.sleep(1)  # rank 0 closes its trackers
    sys.exit(75)
    """
    assert exit_code_of(program) == code


def test_after_an_error_the_time_without_a_peer_begins_anew():
    """The folder of a run without a checkpoint is removed then, which must not be cut short."""
    program = """
    watchdog.PEER_DEAD_S = 2
    peer = subprocess.Popen([sys.executable, "-c", ""])
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog:
        dog._peers = {1: this_process().replace(str(os.getpid()), str(peer.pid), 1)}
        try:
            with dog.training(Path(".")):
                peer.wait()
                time.sleep(1.4)  # a collective that fails late
                raise ValueError
        except ValueError:
            time.sleep(1.2)
    sys.exit(75)
    """
    assert exit_code_of(program) == 75
