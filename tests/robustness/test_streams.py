"""Standard streams that are closed or no longer read: a command completes its work, and no file gets its output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.scripts import training, write_inputs

# Logs, prints and writes a file, as commands do. Printed text must not end up in the file.
COMMAND = """
import os, sys
from utils.process.main import run_main
from utils.errors import UserError
from utils.logger import configure_logging, get_logger

def main(argv):
    configure_logging(True)
    with open(sys.argv[1], "w") as file:
        for number in range(3):
            get_logger().info("line %d", number)
            try:
                os.write(2, b"of a library\\n")
            except OSError:
                pass
        print("printed")
        file.write("whole")
    if sys.argv[2:]:
        raise UserError("a mistake")

run_main(main)
"""
CODE_OF_FIRST = "; exit ${PIPESTATUS[0]}"
LINES = "line 0\nline 1\nline 2\nprinted\n"
OF_LIBRARY = "of a library\n" * 3


def run(
    redirection: str, *argv: object, program: str = COMMAND, interpreter: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` in a shell that redirects its streams."""
    command = ["bash", "-c", f'"$@" {redirection}', "bash", interpreter, "-c", program, *map(str, argv)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize(
    ("redirection", "code", "out", "error"),
    [
        ("", 0, LINES, OF_LIBRARY),
        (">&-", 0, "", OF_LIBRARY),
        ("2>&-", 0, LINES, ""),
        ("<&- >&- 2>&-", 0, "", ""),
        (f"| true{CODE_OF_FIRST}", 0, "", OF_LIBRARY),
    ],
)
def test_a_command_completes_without_a_stream(tmp_path, redirection, code, out, error):
    done = run(redirection, tmp_path / "result")
    assert (done.returncode, done.stdout, done.stderr) == (code, out, error)
    assert (tmp_path / "result").read_text() == "whole"


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_mistake_has_its_exit_code_without_a_stream(tmp_path, redirection):
    done = run(redirection, tmp_path / "result", "fails")
    assert done.returncode == 2
    assert done.stderr.endswith("error: a mistake\n") == ("2>" not in redirection)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", [">&- 2>&-", f"| head -1{CODE_OF_FIRST}"])
def test_a_training_completes_without_a_reader(tmp_path, redirection):
    flags = training(write_inputs(tmp_path), tmp_path / "runs", "--epochs", 2)
    program = "import train; from utils.process.main import run_main; run_main(train.main)"
    done = run(redirection, *flags, program=program, interpreter=python())
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "runs" / "exp"
    assert (folder / "results.csv").read_text().count("\n") == 3
    assert "done: 2 epochs" in (folder / "train.log").read_text()
    assert (folder / "last.pt").stat().st_size > 10_000
