"""Ctrl-C, and the signals with which a scheduler takes the machine back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT
from utils.errors import INTERRUPTED, REQUEUE, Stopped, UserError
from utils.process.signals import StopSignals

SLOW_IMPORT = "print('importing', flush=True)\nimport time\ntime.sleep(60)\n"


def test_ctrl_c_during_the_imports_of_a_program_has_its_exit_code_and_no_traceback(tmp_path):
    (tmp_path / "json.py").write_text(SLOW_IMPORT)  # which all programs import
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for words in (["train.py"], ["launch/ray_train.py"], ["-m", "tools.check"], ["-m", "lockstep", "train"]):
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n", words
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (INTERRUPTED, b""), words


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
from utils.process.main import run_main
from utils.process.signals import StopSignals, exit_on_interrupt

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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_signal_stops_at_once_or_is_recorded(number, code, is_deferred):
    before = signal.getsignal(number)
    if is_deferred:
        with StopSignals() as signals, signals.deferred():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # sent again by a launcher
            assert signals.code == code
    else:
        with pytest.raises(Stopped) as caught, StopSignals():
            os.kill(os.getpid(), number)
        assert caught.value.code == code
    assert signal.getsignal(number) == signal.SIG_IGN  # the process is ending
    signal.signal(number, before)
    with StopSignals():
        pass
    assert signal.getsignal(number) == before


def test_a_bug_after_a_signal_is_its_consequence():
    """A signal to all processes of a job also ends the compiler of ``--compile``."""
    for error, raised in ((RuntimeError("C++ compile error"), Stopped), (UserError("a mistake"), UserError)):
        signals = StopSignals()
        with pytest.raises(raised), signals:  # noqa: PT012
            signals.code = REQUEUE
            raise error


SECOND = """
import os, signal, sys, time
from utils.process.main import run_main
from utils.process.signals import StopSignals, exit_on_interrupt

def train(_):
    with StopSignals() as signals, signals.deferred():
        send()

def detect(_):
    try:
        send()
    finally:
        send()

def send():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGINT)
    print("goes on", flush=True)

exit_on_interrupt()
run_main({})
"""


@pytest.mark.parametrize(
    ("main", "seconds", "out"), [("train", 0, "goes on\n"), ("train", 1.2, ""), ("detect", 0, "goes on\n")]
)
def test_a_second_signal_ends_at_once_unless_a_launcher_has_repeated_the_first(main, seconds, out):
    command = [sys.executable, "-c", SECOND.format(main), str(seconds)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0 if main == "train" and out else 130, out, "")
