"""Checks that interrupted and resumed trainings end with the bits of an uninterrupted one."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.command import ROOT, TORCHRUN
from benchmarks.same_bits import differences
from utils.errors import REQUEUE
from utils.files.torch_file import read_checkpoint

CHECKPOINT_TIMEOUT_S = 120.0  # until the first checkpoint is written
EXIT_TIMEOUT_S = 60.0  # until a process ends after a signal
INTERRUPTIONS: dict[str, tuple[list[str], signal.Signals, int]] = {  # launcher, signal, and expected exit code
    "sigterm": ([], signal.SIGTERM, REQUEUE),
    # A process group, of NCCL on a GPU. torchrun itself ends with 1 after a signal.
    "torchrun": (TORCHRUN, signal.SIGTERM, 1),
    "sigkill": ([], signal.SIGKILL, -signal.SIGKILL),
}


def stop_and_resume(
    *, device: str, data: str, imgsz: int, batch_size: int, epochs: int, interruptions: Sequence[str]
) -> Iterator[str]:
    """Yields how trainings that were ended early in one of `INTERRUPTIONS` and resumed differ from an uninterrupted
    one. They have virtual ranks, deterministic kernels and checkpoints within each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        train = [
            "train.py", "--data", data, "--model", "yolov8n", "--imgsz", str(imgsz), "--batch-size", str(batch_size),
            "--epochs", str(epochs), "--device", device, "--workers", "2", "--virtual-ranks", "4", "--deterministic",
            "--save-minutes", "1e-6", "--val-every", "0", "--noplots", "--cache-dir", str(Path(folder, "index")),
            "--set", "close_mosaic=0", "close_scale=0", "--project", folder, "--name",
        ]  # fmt: skip
        run([*train, "whole"])
        uninterrupted = read_checkpoint(Path(folder, "whole", "last.pt"))
        for name in interruptions:
            launcher, number, expected_code = INTERRUPTIONS[name]
            last = Path(folder, name, "last.pt")
            process = subprocess.Popen([sys.executable, *launcher, *train, name], cwd=ROOT)
            deadline = time.monotonic() + CHECKPOINT_TIMEOUT_S
            while not last.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            process.send_signal(number)
            sent = time.monotonic()
            code = process.wait(EXIT_TIMEOUT_S)
            yield f"{name}: ended {time.monotonic() - sent:.1f} s after the signal"
            if code != expected_code:
                sys.exit(f"{name}: train.py ended with {code}, not {expected_code}")
            progress = read_checkpoint(last)["progress"]
            run(["train.py", "--resume", str(last)])
            places = differences(uninterrupted, read_checkpoint(last))
            case = f"{name} after epoch {progress['epoch']} and batch {progress['batch']}, resumed"
            if places:
                yield f"! {case}: {len(places)} tensors differ, first {places[0]}"
            else:
                yield f"{case}: the same bits as in one go"


def run(command: Sequence[str]) -> None:
    """Runs a script, whose output is this process's. Raises SystemExit if it fails."""
    code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
    if code:
        sys.exit(f"{' '.join(command)} ended with {code}")
