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
from utils.errors import UserError
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


DEAF = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('deaf', flush=True); time.sleep(60)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_processes_without_traceback(tmp_path, number):
    """Ctrl-C reaches all while they start; SIGTERM the parent alone, a second time because a process does not end."""
    (tmp_path / "program.py").write_text(PROGRAM)
    end = "time.sleep(60)" if number == signal.SIGINT else DEAF
    with Processes(tmp_path / "log", real=True) as launch:
        launch.start([launch.python, str(tmp_path / "program.py"), end], PYTHONPATH=str(ROOT))
        if number == signal.SIGINT:
            launch.until(lambda: len(launch.alive()) == 4)  # the parent, multiprocessing's tracker, and two
            for pid in launch.alive():
                with contextlib.suppress(ProcessLookupError):  # its parent was faster
                    os.kill(pid, number)
        else:
            launch.until(lambda: "deaf" in launch.output())
            for pause_s in (1.2, 0):
                launch.started[0].send_signal(number)
                time.sleep(pause_s)
        assert launch.codes(timeout=25) == [130 if number == signal.SIGINT else 75]
        launch.wait_gone()
        assert set(launch.output().split()) <= {"begun", "deaf"}


def report() -> None:
    configure_logging(os.environ["RANK"] == "0")
    os.write(1, f"{multiprocessing.get_start_method()}\n".encode())  # at once: another process prints, too


def test_the_first_process_logs_what_waits_and_all_fork_their_loader_workers(capfd):
    """Flags of other programs are left out before the processes start. Spawning would import torch in each worker."""
    usual = multiprocessing.get_context().get_start_method()
    log_when_configured("--local-rank: left out")
    spawn(report, 2)
    configure_logging(True)
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("--local-rank: left out") == 2  # here, and in the process of rank 0
    assert lines.count(usual) == 2
