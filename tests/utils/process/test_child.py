"""Commands in separate processes that end in every way that `Outcome` names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT
from utils.errors import Stopped
from utils.process.child import RunFailed, start_child
from utils.process.exit_codes import INTERRUPTED, REQUEUE
from utils.process.outcome import Outcome

PROGRAM = """
import os, signal, sys
from utils.errors import PeerLost, Stopped, UserError
from utils.process.entrypoint import run_main
from utils.process.result_file import report_begun, write_result
run_main(lambda argv: exec(argv[0]), sys.argv[1:])
"""
BEGUN = "report_begun('exp'); "


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("write_result(files=['a.onnx'])", Outcome.DONE, ""),
        ("raise UserError('--device 3: no such GPU')", Outcome.REFUSED, "--device 3: no such GPU"),
        ("raise PeerLost('process 1 was killed')", Outcome.LOST, "process 1 was killed"),
        (f"{BEGUN}raise PeerLost('process 1 was killed')", Outcome.LOST, "process 1 was killed"),
        (f"{BEGUN}raise UserError('not finite')", Outcome.FAILED, "not finite"),
        (f"{BEGUN}open('/dev/full', 'wb', 0).write(b'x')", Outcome.REFUSED, "the disk or /dev/shm is full"),
        (f"{BEGUN}1 / 0", Outcome.FAILED, "ZeroDivisionError: division by zero"),
        (f"{BEGUN}sys.exit(3)", Outcome.FAILED, "exit status 3"),
        (f"{BEGUN}os.kill(os.getpid(), signal.SIGKILL)", Outcome.LOST, "killed by SIGKILL; is there enough memory?"),
        (f"{BEGUN}os.kill(os.getpid(), signal.SIGSEGV)", Outcome.FAILED, "killed by SIGSEGV"),
        (f"{BEGUN}raise Stopped(75)", Outcome.STOPPED, ""),
    ],
)
def test_how_a_command_ends(code, outcome, reason):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with start_child(
        [sys.executable, "-c", PROGRAM, code], environment=environment, stderr=subprocess.DEVNULL
    ) as child:
        result = child.wait()
        assert child.poll() == result
    assert result.outcome == outcome
    assert result.reason[: len(reason)] == reason
    assert bool(result.reason) == bool(reason)
    if outcome == Outcome.DONE:
        assert result.values == {"files": ["a.onnx"]}
        result.check()
    else:
        with pytest.raises(Stopped if outcome == Outcome.STOPPED else RunFailed):
            result.check()


@pytest.mark.parametrize(("name", "code"), [("TERM", REQUEUE), ("USR1", REQUEUE), ("INT", INTERRUPTED)])
def test_a_signal_that_a_command_does_not_handle_yet_stops_it(name, code):
    with start_child(["sh", "-c", f"kill -{name} $$"]) as child, pytest.raises(Stopped) as caught:
        child.wait().check()
    assert caught.value.code == code


def test_a_command_ends_with_the_block():
    with start_child(["sleep", "60"], stop=signal.SIGINT) as child:
        assert child.poll() is None
    assert child.process.returncode == -signal.SIGINT


def test_a_child_runs_in_the_folder_and_the_session_that_are_asked_for(tmp_path):
    code = f"import os; print(os.getcwd(), os.getsid(0) != {os.getsid(0)})"
    words = [sys.executable, "-c", code]
    with start_child(words, cwd=str(tmp_path), stdout=subprocess.PIPE, start_new_session=True) as child:
        output, _ = child.process.communicate()
    assert output.decode().split() == [str(tmp_path), "True"]
