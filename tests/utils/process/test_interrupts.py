"""Ctrl-C while a script is importing its modules."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT
from utils.config.commands import COMMANDS
from utils.process.exit_codes import INTERRUPTED, REQUEUE

SLOW_IMPORT = "print('importing', flush=True)\nimport time\ntime.sleep(60)\n"


def started_as() -> list[list[str]]:
    """Returns, for each program, the words after ``python`` that start it."""
    scripts = [[f"{path}.py"] for path in ("train", "val", "detect", "export", "launch/ray_train")]
    tools = [["-m", f"tools.{name}"] for name, command in COMMANDS.items() if command.is_tool]
    return [*scripts, *tools, ["-m", "lockstep", "train"]]


def test_ctrl_c_during_the_imports_of_a_program_has_its_exit_code_and_no_traceback(tmp_path):
    (tmp_path / "json.py").write_text(SLOW_IMPORT)  # which all programs import
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


LOSES_EXCEPTIONS = """
import os, signal
try:
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    for _ in range(1000):
        pass
except BaseException:  # as the initialization of an extension module clears an error
    pass
"""
MAIN = """
from utils.process.entrypoint import run_main
from utils.process.interrupts import exit_on_interrupt
from utils.process.stop_signals import StopSignals

def val(_):
    import torch
    print("the signal is lost")

def train(argv):
    with StopSignals():
        val(argv)

exit_on_interrupt()
run_main({})
"""


@pytest.mark.parametrize(
    ("main", "number", "code"),
    [("val", signal.SIGINT, INTERRUPTED), ("train", signal.SIGINT, INTERRUPTED), ("train", signal.SIGTERM, REQUEUE)],
)
def test_a_signal_is_not_lost_while_torch_is_imported(main, number, code, tmp_path):
    (tmp_path / "torch.py").write_text(LOSES_EXCEPTIONS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SIGNAL": str(int(number))}
    command = [sys.executable, "-c", MAIN.format(main)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


REPEATED = """
import os, signal
from utils.process.entrypoint import run_main
from utils.process.interrupts import exit_on_interrupt

def main(_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)

exit_on_interrupt()
run_main(main)
"""


def test_a_ctrl_c_that_a_parent_repeats_interrupts_once():
    ended = subprocess.run([sys.executable, "-c", REPEATED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "")
