"""Processes that `spawn` starts: how their ends are reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import pytest

from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from utils.process.child import start_child
from utils.process.outcome import Outcome


def write_program(folder: Path, *, definitions: str = "", sleeping_rank: int | None = 0, **options: object) -> str:
    """Writes a program whose argument is what each of two spawned processes does, but ``sleeping_rank``, which sleeps.
    A process that has lost its peer ends at once, as the test sees the messages of all.

    ``definitions``: code before that of the program. ``options``: of `spawn`.
    """
    path = folder / "program.py"
    path.write_text(f"""
import os, signal, sys, time
import utils.process.entrypoint
from utils.process.spawn import spawn
from utils.process.entrypoint import run_main
from utils.errors import FailedCheck, PeerFailure, UserError
utils.process.entrypoint.PEER_GRACE_S = 0
{definitions}

def work(end):
    if os.environ["RANK"] == "{sleeping_rank}":
        time.sleep(60)
    exec(end)

def main(argv):
    spawn(work, 2, argv, **{options})
    print("all done")

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
""")
    return str(path)


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        ("os._exit(0)", 2, "error: process 1 of 2 ended with status 0 without a message"),
        ("sys.exit(4)", 2, "error: process 1 of 2 ended with status 4 without a message"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, "error: process 1 of 2 was killed by SIGKILL; is there enough"),
        ("raise UserError('wrong flag')", 2, "error: wrong flag"),
        ("raise FailedCheck('a wrong file')", 1, "error: a wrong file"),
        ("raise ValueError('a bug')", 70, "ValueError: a bug"),
        ("pass", 0, ""),
    ],
)
def test_the_end_of_each_process_is_reported_once(tmp_path, end, code, line):
    impatient = "import utils.process.spawn as module\nmodule.FAILURE_GRACE_S = 0.5"  # the other process sleeps anyway
    program = write_program(tmp_path, definitions=impatient, sleeping_rank=0 if line else None)
    started = time.monotonic()
    done = subprocess.run(
        [python(), program, end],
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
    assert done.stdout == ("" if code else "all done\n")
    assert time.monotonic() - started < 50


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", Outcome.LOST),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Outcome.REFUSED),  # it would crash again
        ("sys.exit(3)", Outcome.REFUSED),  # as a callback does
    ],
)
def test_a_parent_learns_whether_another_try_may_succeed(tmp_path, end, outcome):
    program = write_program(tmp_path, sleeping_rank=None)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with start_child([python(), program, end], environment=environment) as child:
        result = child.wait()
    assert (result.outcome, result.code) == (outcome, 2)


@pytest.mark.parametrize(("options", "code"), [({}, 143), ({"stop_code": 75}, 75)])
def test_a_signal_before_processes_handle_it(tmp_path, options, code):
    program = write_program(tmp_path, **options)
    process = subprocess.Popen(
        [python(), program, "print('begun', flush=True); time.sleep(60)"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == code


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_while_processes_start_ends_all_quietly(tmp_path, name, code):
    start = f"def start(self):\n    os.kill(os.getpid(), signal.{name})\n    begin(self)\n"
    patch = f"from multiprocessing.process import BaseProcess as Base\nbegin = Base.start\n{start}Base.start = start\n"
    program = write_program(tmp_path, definitions=f"if __name__ == '__main__':\n{indent(patch, '    ')}")
    done = subprocess.run(
        [sys.executable, program, "time.sleep(60)"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(
    "end",
    [
        # All processes refuse after the signal; one has refused before the signal.
        "signal.signal(signal.SIGTERM, refuse); os.write(1, b'begun\\n'); time.sleep(60)",
        "print(os.getpid(), flush=True); refuse()",
    ],
)
def test_a_refusal_stays_one_if_a_signal_arrives(tmp_path, end):
    refuse = "def refuse(*_):\n    raise UserError('wrong flag') if os.environ['RANK'] == '1' else PeerFailure('')"
    sleeping_rank = None if "SIGTERM" in end else 0
    program = write_program(tmp_path, definitions=refuse, sleeping_rank=sleeping_rank, stop_code=75)
    process = subprocess.Popen(
        [sys.executable, program, end],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if "SIGTERM" in end:
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    else:
        pid = process.stdout.readline().strip()
        while Path(f"/proc/{pid}").exists():  # until its parent has read its exit code
            time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == 2
    assert errors == "error: wrong flag\n"
