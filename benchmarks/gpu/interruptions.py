"""Checks that interrupted and resumed trainings end with the bits of an uninterrupted one."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.command import ROOT
from benchmarks.same_bits import differences
from utils.errors import REQUEUE
from utils.files.torch_file import read_checkpoint

CHECKPOINT_TIMEOUT_S = 120.0  # until the first checkpoint is written
EXIT_TIMEOUT_S = 60.0  # until a process ends after a signal
# The loopback interface is used because the host's name may not resolve.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "1"]


class Interruption(NamedTuple):
    """A way to end a training early."""

    launcher: list[str]
    signal: signal.Signals
    exit_code: int


INTERRUPTIONS = {
    "sigterm": Interruption([], signal.SIGTERM, REQUEUE),
    # A process group, of NCCL on a GPU. torchrun itself ends with 1 after a signal.
    "torchrun": Interruption(TORCHRUN, signal.SIGTERM, 1),
    "sigkill": Interruption([], signal.SIGKILL, -signal.SIGKILL),
}


def stop_and_resume(options: argparse.Namespace) -> Iterator[str]:
    """Yields how interrupted and resumed runs differ from an uninterrupted one, for each of ``--interruption``. Raises
    SystemExit if bits differ."""
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        whole = train_command(options, folder, "whole")
        expect_exit_code(0, subprocess.run(whole, cwd=ROOT, check=False).returncode, whole)
        uninterrupted = read_checkpoint(Path(folder, "whole", "last.pt"))
        for name in options.interruptions:
            interruption = INTERRUPTIONS[name]
            last = Path(folder, name, "last.pt")
            python, *script = train_command(options, folder, name)
            command = [python, *interruption.launcher, *script]
            progress, seconds = interrupt(command, last, interruption)
            yield f"{name}: ended {seconds:.1f} s after the signal"
            resume = [sys.executable, "train.py", "--resume", str(last)]
            expect_exit_code(0, subprocess.run(resume, cwd=ROOT, check=False).returncode, resume)
            tensors = differences(uninterrupted, read_checkpoint(last))
            case = f"{name} after epoch {progress['epoch']} and batch {progress['batch']}, resumed"
            if tensors:
                problems.append(f"{case}: {len(tensors)} tensors differ, first {tensors[0]}")
            else:
                yield f"{case}: the same bits as in one go"
    if problems:
        sys.exit("; ".join(problems))


def train_command(options: argparse.Namespace, folder: str, name: str) -> list[str]:
    """Returns the command of a training with virtual ranks, deterministic kernels and checkpoints within each epoch."""
    return [
        sys.executable, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", str(options.batch_size), "--epochs", str(options.epochs), "--device", options.device,
        "--workers", "2", "--virtual-ranks", "4", "--deterministic", "--save-minutes", "1e-6", "--val-every", "0",
        "--noplots", "--cache-dir", str(Path(folder, "index")), "--project", folder, "--name", name,
        "--set", "close_mosaic=0", "close_scale=0",
    ]  # fmt: skip


def interrupt(command: Sequence[str], last: Path, interruption: Interruption) -> tuple[dict, float]:
    """Runs ``command`` until it has written the checkpoint ``last``, then sends it the signal. Returns the position of
    the checkpoint, and the seconds that the process took to end. Raises SystemExit if its exit code is wrong."""
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + CHECKPOINT_TIMEOUT_S
    while not last.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(interruption.signal)
    sent = time.monotonic()
    expect_exit_code(interruption.exit_code, process.wait(EXIT_TIMEOUT_S), command)
    return read_checkpoint(last)["progress"], time.monotonic() - sent


def expect_exit_code(expected: int, code: int, command: Sequence[str]) -> None:
    if code != expected:
        sys.exit(f"{' '.join(command)} ended with {code}, not {expected}")
