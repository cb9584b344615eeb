"""Ctrl-C while a script is importing its modules."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from utils.interrupts import INTERRUPTED
from utils.program import COMMANDS

ROOT = Path(__file__).parents[2]
SLOW_IMPORT = "print('importing', flush=True)\nimport time\ntime.sleep(60)\n"


def started_as() -> list[list[str]]:
    """The words after ``python`` that start each program."""
    scripts = [[f"{path}.py"] for path in ("train", "val", "detect", "export", "launch/ray_train")]
    tools = [["-m", f"tools.{name}"] for name, command in COMMANDS.items() if "/" in command.path]
    return [*scripts, *tools, ["-m", "lockstep", "train"]]


def test_ctrl_c_during_the_imports_of_a_program_has_its_exit_code_and_no_traceback(tmp_path):
    (tmp_path / "logging.py").write_text(SLOW_IMPORT)  # which all programs import
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    programs = started_as()
    assert len(programs) == 13
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in programs
    ]
    ended = {}
    for words, process in zip(programs, started):
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n", words
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        ended[" ".join(words)] = (process.returncode, errors)
    assert ended == dict.fromkeys(ended, (INTERRUPTED, ""))
