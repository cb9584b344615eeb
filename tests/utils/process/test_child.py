"""Commands in separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT
from utils.errors import REQUEUE, Stopped
from utils.process.child import RunFailed, read_result, start_child

PROGRAM = """
import os, signal, sys
from utils.errors import Stopped, UserError
from utils.process.main import run_main
from utils.process.child import report_started, write_result
run_main(lambda argv: exec(argv[0]), sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("code", "status", "reason", "values"),
    [
        ("write_result(files=['a.onnx'])", 0, "", {"files": ["a.onnx"]}),
        ("raise UserError('--device 3: no such GPU')", 2, "--device 3: no such GPU", None),
        ("report_started('exp'); 1 / 0", 1, "ZeroDivisionError: division by zero", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "killed by SIGKILL; is there enough memory?", {}),
        ("os.kill(os.getpid(), signal.SIGTERM)", REQUEUE, "", {}),  # it does not handle the signal
    ],
)
def test_how_a_command_ends(code, status, reason, values):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", PROGRAM, code]
    with start_child(words, environment=environment, stderr=subprocess.DEVNULL) as child:
        result = child.wait()
        assert child.poll() == result
    assert (result.code, result.reason, result.has_begun) == (status, reason, "started" in code)
    if values is not None:
        assert result.values == values
    if status == 0:
        result.check()
    else:
        with pytest.raises(Stopped if status == REQUEUE else RunFailed):
            result.check()


def test_a_command_ends_with_the_block():
    with start_child(["sleep", "60"], stop=signal.SIGINT) as child:
        assert child.poll() is None
    assert child.process.returncode == -signal.SIGINT


def test_a_child_ends_with_its_killed_parent():
    code = (
        "import os, signal\nfrom utils.process.child import start_child\nwith start_child(['sleep', '60']) as child:\n"
    )
    code += "    print(child.process.pid, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=30)
    assert ended.returncode == -signal.SIGKILL  # and the pipe is closed: the child has ended
    assert ended.stdout


def test_half_a_line_of_results_is_left_out(tmp_path):
    path = tmp_path / "result.jsonl"
    path.write_text('\n{"folder": "exp"}\n{"error": "the disk\n{"error": "lr0: wrong"}')
    assert read_result(path) == {"folder": "exp", "error": "lr0: wrong"}
