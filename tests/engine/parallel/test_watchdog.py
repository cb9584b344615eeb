"""The watchdog in processes of its own: it ends them."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT

PRELUDE = """
import os, signal, subprocess, sys, time, types
from pathlib import Path
import engine.parallel.watchdog as watchdog
from utils.process.stop_signals import StopSignals
from utils.process.identity import this_process
from utils.errors import Stopped

watchdog.CHECK_EVERY_S, watchdog.PEER_DEAD_S, watchdog.STOP_TIMEOUT_S = 0.02, 0.2, 0.2
LONG_S = 50  # the process is ended long before

def watch_child(dog):
    # Starts a process, which ends when it is killed, as the only peer that is watched.
    peer = subprocess.Popen(["sleep", "60"])
    identity = this_process().replace(str(os.getpid()), str(peer.pid), 1)
    watchdog.all_objects = lambda ctx, local: [local, identity]
    dog.watch_peers(None)
    return peer
"""


def exit_code_of(program: str) -> int:
    code = PRELUDE + textwrap.dedent(program)
    return subprocess.run([python(), "-c", code], cwd=ROOT, timeout=60).returncode


@pytest.mark.parametrize(("agreed", "code"), [(True, 0), (False, 75)])
def test_a_checkpoint_may_take_long_once_the_ranks_have_agreed_to_stop(agreed, code):
    program = f"""
    clock = [0.0]
    if {agreed}:
        watchdog.time = types.SimpleNamespace(monotonic=lambda: clock[0])
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog, signals.deferred():
        with dog.training(Path(".")):
            os.kill(os.getpid(), signal.SIGTERM)
            if {agreed}:
                dog.remove_stop_limit()
            clock[0] = 100.0  # the checkpoint is written
            time.sleep(0.3 if {agreed} else LONG_S)
    """
    assert exit_code_of(program) == code


def test_steps_that_end_after_a_signal_keep_the_process_alive():
    """The ranks agree to stop two steps later."""
    program = """
    clock = [0.0]
    watchdog.time = types.SimpleNamespace(monotonic=lambda: clock[0])
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog, signals.deferred():
        with dog.training(Path(".")):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(4):
                time.sleep(0.06)  # in which the watchdog looks
                clock[0] += 0.15
                dog.beat()
            dog.remove_stop_limit()
    """
    assert exit_code_of(program) == 0


def test_a_process_ends_after_the_write_of_its_checkpoint():
    """The signal would end it after 0.2 s; the write takes a second."""
    program = """
    written = []
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog, signals.deferred():
        with dog.training(Path("."), is_writing=lambda: not written):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
            dog.remove_stop_limit()
            written.append("last.pt")
    """
    assert exit_code_of(program) == 0


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_stop_in_a_long_step_is_one_line_that_says_how_to_continue(tmp_path, has_checkpoint):
    """The first step of --compile takes minutes, for example."""
    if has_checkpoint:
        (tmp_path / "last.pt").touch()
    program = f"""
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog, signals.deferred():
        with dog.training(Path({str(tmp_path)!r})):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LONG_S)
    """
    done = subprocess.run(
        [python(), "-c", PRELUDE + textwrap.dedent(program)], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    more = f"; continue with: --resume {tmp_path / 'last.pt'}" if has_checkpoint else ""
    assert done.stdout + done.stderr == (
        f"error: stopped by a signal, but the step does not end; no new checkpoint{more}\n"
    )
    assert done.returncode == 75


@pytest.mark.parametrize(("error", "seconds", "code"), [("Stopped(75)", "1", 75), ("ValueError()", "LONG_S", 2)])
def test_an_orderly_stop_is_not_cut_short_when_another_rank_has_ended(error, seconds, code):
    program = f"""
    with StopSignals() as signals, watchdog.Watchdog(signals) as dog:
        peer = watch_child(dog)
        try:
            with dog.training(Path(".")):
                raise {error}
        except (Stopped, ValueError):
            peer.kill()
            peer.wait()
            time.sleep({seconds})  # rank 0 closes its trackers
    sys.exit(75)
    """
    assert exit_code_of(program) == code


def test_after_an_error_the_time_without_a_peer_begins_anew():
    """The folder of a run without a checkpoint is removed then, which must not be cut short."""
    program = """
    watchdog.PEER_DEAD_S = 2
    clock = [0.0]
    watchdog.time = types.SimpleNamespace(monotonic=lambda: clock[0])

    def spend(seconds):
        clock[0] += seconds
        time.sleep(0.3)  # in which the watchdog looks several times

    with StopSignals() as signals, watchdog.Watchdog(signals) as dog:
        peer = watch_child(dog)
        try:
            with dog.training(Path(".")):
                peer.kill()
                peer.wait()
                spend(0)
                spend(1.4)  # a collective that fails late
                raise ValueError
        except ValueError:
            spend(1.2)
    sys.exit(75)
    """
    assert exit_code_of(program) == 75
