"""The death of a loader process by the kernel's hand is one line."""

from __future__ import annotations

from tests.helpers.scripts import run_python, training, write_inputs

KILLING = """
import multiprocessing, os, signal
import train
from engine.train.step import TrainStep
from utils.process.main import run_main

def step(*_, **options):
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

TrainStep.__call__ = step
run_main(train.main)
"""


def test_a_killed_loader_worker_is_one_line(tmp_path):
    flags = training(write_inputs(tmp_path, train=40), tmp_path, "--epochs", 1, "--workers", 1)
    (line,) = run_python("-c", KILLING, *flags, code=2).stderr.splitlines()
    assert line.startswith("error: a loader process was killed by SIGKILL; is there enough memory?")
