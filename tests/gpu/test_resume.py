"""Interrupted and resumed trainings end with the bits of an uninterrupted one."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.same_bits import differences
from tests.gpu.commands import LOOPBACK, TORCHRUN, run
from tests.gpu.machine import Figure, Machine
from tests.helpers.processes import Processes
from utils.files.torch_file import read_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def flags(machine: Machine, train_flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Trainings with virtual ranks, deterministic kernels, and checkpoints within each epoch."""
    return [
        *train_flags, "--epochs", machine.resumed_epochs, "--virtual-ranks", 4, "--deterministic",
        "--save-minutes", "1e-6", "--val-every", 0, "--cache-dir", tmp_path_factory.mktemp("index"),
        "--set", "close_mosaic=0", "close_scale=0",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(*flags, "--project", folder)
    return read_checkpoint(folder / "exp" / "last.pt")


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        # A process group, of NCCL on a GPU. torchrun itself ends with 1 after a signal.
        pytest.param((*TORCHRUN, 1), signal.SIGTERM, 1, id="torchrun", marks=pytest.mark.quick),
        pytest.param((), signal.SIGKILL, -signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_an_interrupted_training_ends_with_the_same_bits(
    flags: list[object],
    uninterrupted: dict,
    tmp_path: Path,
    figure: Figure,
    launcher: tuple,
    number: signal.Signals,
    code: int,
):
    last = tmp_path / "exp" / "last.pt"
    with Processes(tmp_path / "log.txt", real=True) as processes:
        command = [sys.executable, *launcher, *flags, "--project", tmp_path]
        process = processes.start([str(word) for word in command], **LOOPBACK)
        processes.until(last.exists)
        process.send_signal(number)
        sent = time.monotonic()
        assert processes.codes(60) == [code], processes.output()
        figure("seconds from the signal to the end", round(time.monotonic() - sent, 1))
    progress = read_checkpoint(last)["progress"]
    figure("interrupted after epoch and batch", (progress["epoch"], progress["batch"]))
    run("train.py", "--resume", last)
    assert not differences(uninterrupted, read_checkpoint(last))
