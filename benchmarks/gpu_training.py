"""Whole trainings on a GPU as a user starts them: how fast they are, how busy the GPU is, and that one that was stopped
goes on to the same bits."""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.turns import ROOT

EPOCH_LINE = re.compile(r"epoch (\d+)/\d+ +(\d+)/(\d+) .* ([\d.]+) img/s +wait (\d+)%")
SAMPLE_MS = 100


class GpuMeter:
    """How busy a GPU is: the share of each tenth of a second in which a kernel ran, as nvidia-smi says it."""

    def __init__(self, device: str) -> None:
        self.samples: list[tuple[float, float]] = []  # time, share
        self._process = None
        if device != "cpu" and shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "-i", device, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen([*query, "-lms", str(SAMPLE_MS)], stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.samples.append((time.monotonic(), int(line) / 100))

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def busy(self, start: float, end: float) -> float | None:
        """The mean share between two times; None where it is not known."""
        shares = [share for at, share in self.samples if start <= at <= end]
        return statistics.fmean(shares) if shares else None


def command_of(options: argparse.Namespace, folder: Path, *more: str) -> list[str]:
    return [
        sys.executable, "train.py", "--data", options.data, "--model", options.model, "--imgsz", str(options.imgsz),
        "--batch-size", str(options.batch_size), "--epochs", str(options.epochs), "--device", options.device,
        "--val-every", "0", "--noplots", "--workers", str(workers()), "--cache-dir", str(folder / "index"),
        "--project", str(folder), "--set", "close_mosaic=0", *more,
    ]  # fmt: skip


def workers() -> int:
    return max(1, min((os.cpu_count() or 2) - 2, 14))


def layouts() -> dict[str, list[str]]:
    """Ways to feed the device, by what this version offers."""
    flags = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    found = {"pictures from workers, cache ram": ["--cache", "ram"]}
    if "--augment" in flags:
        found["pictures on the device, cache device"] = ["--augment", "device", "--cache", "device"]
    return found


def time_training(options: argparse.Namespace) -> Iterator[str]:
    """Lines about trainings on ``options.data``; SystemExit if one fails."""
    for name, flags in layouts().items():
        with tempfile.TemporaryDirectory() as folder:
            speed, wait, busy = last_epochs(command_of(options, Path(folder), *flags), options)
        used = "unknown" if busy is None else f"{busy:.0%}"
        yield f"{name}: {speed:.0f} images/s, loop waits for data {wait:.0%} of the time, GPU busy {used}"
    if options.peer:
        yield f"Ultralytics, cache ram: {peer_speed(options):.0f} images/s"


def last_epochs(command: Sequence[str], options: argparse.Namespace) -> tuple[float, float, float | None]:
    """Images a second, share of waiting for data, share of GPU time, the latter with what lies between the epochs: of a
    training's epochs after the first, medians."""
    meter = GpuMeter(options.device)
    ends: list[float] = []
    speeds: list[float] = []
    waits: list[float] = []
    lines: list[str] = []
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    for line in process.stdout:
        lines.append(line)
        match = EPOCH_LINE.search(line)
        if match and match[2] == match[3]:
            ends.append(time.monotonic())
            speeds.append(float(match[4]))
            waits.append(int(match[5]) / 100)
    code = process.wait()
    meter.close()
    if code or len(ends) < 2:
        sys.exit(f"{' '.join(command)} ended with {code}:\n{''.join(lines[-8:])}")
    return statistics.median(speeds[1:]), statistics.median(waits[1:]), meter.busy(ends[0], ends[-1])


def peer_speed(options: argparse.Namespace) -> float:
    """Images a second of the peer's epochs after the first, without validation."""
    with tempfile.TemporaryDirectory() as folder:
        side = str(ROOT / "benchmarks" / "ultralytics_side.py")
        command = [options.peer, side, "train", "--data", options.data, "--model", f"{options.model}.yaml"]
        command += ["--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size), "--workers", str(workers())]
        command += ["--device", options.device, "--epochs", str(options.epochs), "--cache", "ram", "--no-val"]
        command += ["--project", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        with open(next(Path(folder).rglob("results.csv")), newline="") as file:
            times = [float({k.strip(): v for k, v in row.items()}["time"]) for row in csv.DictReader(file)]
    return training_images(options.data) * (len(times) - 1) / (times[-1] - times[0])


def training_images(data: str) -> int:
    from data.dataset_yaml import load_dataset_spec
    from data.listing import list_split

    return len(list_split(load_dataset_spec(data), "train").images)


def stop_and_resume(data: str, device: str, imgsz: int, epochs: int) -> str:
    """Trains with 4 virtual ranks and deterministic kernels, once in one go and once stopped by SIGTERM and resumed.

    Returns a line; SystemExit if the two don't end with the same bits.
    """
    from benchmarks.same_bits import differences
    from utils.checkpoint_file import read_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        base = argparse.Namespace(data=data, model="yolov8n", imgsz=imgsz, batch_size=8, epochs=epochs, device=device)
        flags = ["--virtual-ranks", "4", "--deterministic", "--save-steps", "2"]
        whole = command_of(base, Path(folder), *flags, "--name", "whole")
        stopped = command_of(base, Path(folder), *flags, "--name", "stopped")
        expect(subprocess.run(whole, cwd=ROOT, check=False).returncode, 0, whole)
        last = Path(folder, "stopped", "last.pt")
        process = subprocess.Popen(stopped, cwd=ROOT)
        while not last.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        expect(process.wait(), 75, stopped)
        at = read_checkpoint(last)["progress"]
        again = [sys.executable, "train.py", "--resume", str(last)]
        expect(subprocess.run(again, cwd=ROOT, check=False).returncode, 0, again)
        places = differences(read_checkpoint(Path(folder, "whole", "last.pt")), read_checkpoint(last))
        if places:
            sys.exit(f"{len(places)} tensors differ after the resume, first {places[:3]}")
    return f"stopped in epoch {at['epoch'] + 1} after batch {at['batch']}, resumed: the same bits as in one go"


def expect(code: int, wanted: int, command: Sequence[str]) -> None:
    if code != wanted:
        sys.exit(f"{' '.join(command)} ended with {code}, not {wanted}")
