"""Processes that `spawn` starts: how their ends are reported, and signals."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time

import pytest

from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.repository import ROOT
from utils.logger import configure_logging, log_when_configured
from utils.process.spawn import spawn

# Rank 1 does what the argument says; rank 0 waits, unless there is nothing to wait for.
PROGRAM = """
import os, signal, sys, time
from utils.errors import FailedCheck, UserError
from utils.process import main as main_module
from utils.process.main import run_main
from utils.process.spawn import spawn

def work(end):
    if os.environ["RANK"] == "0" and end != "pass":
        time.sleep(60)
    exec(end)

def main(argv):
    print("begun", flush=True)
    spawn(work, 2, argv)
    print("all done")

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, "error: process 1 of 2 was killed by SIGKILL; is there enough"),
        ("raise UserError('wrong flag')", 2, "error: wrong flag"),
        ("raise ValueError('a bug')", 1, "ValueError: a bug"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 75, ""),
        ("pass", 0, ""),
    ],
)
def test_the_end_of_each_process_is_reported_once(tmp_path, end, code, line):
    (tmp_path / "program.py").write_text(PROGRAM)
    started = time.monotonic()
    done = subprocess.run(
        [python(), str(tmp_path / "program.py"), end],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1:]
    assert [text[: len(line)] for text in last] == ([line] if line else [])
    assert done.stderr.count("rror: ") == bool(line), done.stderr
    assert done.stdout == ("begun\n" if code else "begun\nall done\n")
    assert time.monotonic() - started < 50


def say() -> None:
    configure_logging(os.environ["RANK"] == "0")


def test_lines_that_wait_for_the_log_are_logged_by_the_first_process(capfd):
    """Such as flags of other programs that are left out: the settings are parsed before the processes start."""
    log_when_configured("--local-rank: left out")
    spawn(say, 2)
    configure_logging(True)
    assert capfd.readouterr().out.count("--local-rank: left out\n") == 2  # here, and in the process of rank 0


@pytest.mark.parametrize(("seconds", "number", "code"), [(0.0, signal.SIGINT, 130), (0.7, signal.SIGTERM, 75)])
def test_a_signal_while_processes_start_ends_all_without_traceback(tmp_path, number, code, seconds):
    """Each gets Ctrl-C twice, as from a terminal: also from the parent."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with Processes(tmp_path / "log", real=True) as launch:
        launch.start([launch.python, str(tmp_path / "program.py"), "time.sleep(60)"], PYTHONPATH=str(ROOT))
        launch.until(lambda: len(launch.alive()) == 4)  # the parent, multiprocessing's tracker, and two
        time.sleep(seconds)
        for pid in launch.alive() if number == signal.SIGINT else [launch.started[0].pid]:
            with contextlib.suppress(ProcessLookupError):  # its parent was faster
                os.kill(pid, number)
        assert launch.codes() == [code]
        launch.wait_gone()
        assert launch.output() == "begun\n"


SLOW_STARTS = """
from multiprocessing.process import BaseProcess
start = BaseProcess.start

def start_slowly(process):
    start(process)
    time.sleep(0.8)

BaseProcess.start = start_slowly
"""


def test_signals_while_processes_start_end_the_command_before_all_have_started(tmp_path):
    program = PROGRAM.replace("spawn(work, 2, argv)", "spawn(work, 8, argv)")
    (tmp_path / "program.py").write_text(program.replace("def main", f"{SLOW_STARTS}\ndef main"))
    with Processes(tmp_path / "log", real=True) as launch:
        launch.start([launch.python, str(tmp_path / "program.py"), "time.sleep(60)"], PYTHONPATH=str(ROOT))
        launch.until(lambda: len(launch.alive()) >= 3)  # the parent, multiprocessing's tracker, and one
        for pause_s in (1.2, 0):
            launch.started[0].send_signal(signal.SIGTERM)
            time.sleep(pause_s)
        started = time.monotonic()
        assert launch.codes() == [75]
        launch.wait_gone()
        assert time.monotonic() - started < 3
        assert launch.output() == "begun\n"


def print_start_method() -> None:
    os.write(1, f"{multiprocessing.get_start_method()}\n".encode())  # at once: another process prints, too


def test_spawned_processes_fork_their_loader_workers(capfd):
    """Spawning would import torch again in each worker, which takes seconds."""
    usual = multiprocessing.get_context().get_start_method()
    spawn(print_start_method, 2)
    assert capfd.readouterr().out.split() == [usual, usual]
