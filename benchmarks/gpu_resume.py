"""Trainings that are stopped or killed and then resumed have the same bits as an uninterrupted one."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.same_bits import differences
from benchmarks.turns import ROOT
from utils.files.checkpoint import read_checkpoint

STOPPED = 75  # how train.py ends when a signal has asked it to stop
WRITTEN_S, ENDED_S = 120.0, 60.0  # until a first checkpoint is there; after a signal


def stop_and_resume(options: argparse.Namespace) -> Iterator[str]:
    """Lines of figures. SystemExit if a resumed run does not end with the bits of the uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        whole = train(options, folder, "whole")
        expect(subprocess.run(whole, cwd=ROOT, check=False).returncode, 0, whole)
        wanted, differing = read_checkpoint(Path(folder, "whole", "last.pt")), []
        for name, number, code in (("stopped", signal.SIGTERM, STOPPED), ("killed", signal.SIGKILL, -signal.SIGKILL)):
            last = Path(folder, name, "last.pt")
            at = break_off(train(options, folder, name), last, number, code)
            again = [sys.executable, "train.py", "--resume", str(last)]
            expect(subprocess.run(again, cwd=ROOT, check=False).returncode, 0, again)
            places = differences(wanted, read_checkpoint(last))
            text = f"{name} after epoch {at['epoch']} and batch {at['batch']}, resumed"
            yield f"{text}: {f'{len(places)} tensors differ' if places else 'the same bits as in one go'}"
            differing += [f"{text}: {len(places)} tensors differ, first {places[0]}"] if places else []
    if differing:
        sys.exit("; ".join(differing))


def train(options: argparse.Namespace, folder: str, name: str) -> list[str]:
    """The command of a training with virtual ranks, deterministic kernels, and a checkpoint every second step."""
    return [
        sys.executable, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", str(options.batch_size), "--epochs", str(options.epochs), "--device", options.device,
        "--workers", "2", "--virtual-ranks", "4", "--deterministic", "--save-steps", "2", "--val-every", "0",
        "--noplots", "--cache-dir", str(Path(folder, "index")), "--project", folder, "--name", name,
        "--set", "close_mosaic=0", "close_scale=0",
    ]  # fmt: skip


def break_off(command: Sequence[str], last: Path, number: signal.Signals, code: int) -> dict:
    """Runs ``command`` until it has written ``last``, then sends it a signal, after which it must end with ``code``.
    Returns the position of that checkpoint."""
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + WRITTEN_S
    while not last.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    expect(process.wait(ENDED_S), code, command)
    return read_checkpoint(last)["progress"]


def expect(code: int, wanted: int, command: Sequence[str]) -> None:
    if code != wanted:
        sys.exit(f"{' '.join(command)} ended with {code}, not {wanted}")
