"""`work_in_child`: what a launcher sees of the end of the child that does the work of its process."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.preloaded import python

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, sys, time
from utils.distributed import spawn
from utils.entrypoint import run_main
def main(argv):
    spawn.HANGS_AFTER_S = 1.0
    heartbeat = spawn.work_in_child()
    if heartbeat is None:
        return
    print(os.getpid(), flush=True)
    WORK
run_main(main)
"""


def start(work: str) -> tuple[subprocess.Popen, int]:
    command = [python(), "-c", PROGRAM.replace("WORK", work)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    line = process.stdout.readline()
    assert line, process.communicate()
    return process, int(line)


@pytest.mark.parametrize(
    ("work", "code", "line"),
    [
        ("heartbeat.beat(); sys.exit(3)", 0, ""),
        ("heartbeat.beat(); os.kill(os.getpid(), signal.SIGKILL)", 0, ""),
        ("heartbeat.beat(); os.kill(os.getpid(), signal.SIGSTOP)", 0, ""),
        ("heartbeat.beat(); time.sleep(60)", 0, ""),
        ("pass", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, "killed by SIGKILL"),
    ],
)
def test_a_child_fails_for_its_launcher_only_before_its_first_beat(work, code, line):
    process, child = start(work)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, line in errors) == (code, True), errors
    assert not _exists(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_child_ends_with_its_parent(number):
    process, child = start("heartbeat.beat(); spawn.time.sleep(60)")
    process.send_signal(number)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while _exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _exists(child)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
