"""The time until ``--help`` is printed, and until the first step of a training on a data set that was scanned before.

    python -m benchmarks.speed.startup --data bccd.yaml --peer PYTHON

The peer's ``--help`` is ``yolo help``; a callback of its trainer reports its first step. Each run is a separate
process, timed from outside; the two sides alternate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.speed.dataset_copy import copied
from benchmarks.speed.report import Comparison, add_flags, show
from benchmarks.speed.turns import MARK, PEER_SIDE, ROOT

FIRST_STEP = "first step "  # of train.py's log


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.startup", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True, help="data set with YOLO labels")
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    add_flags(parser)
    options = parser.parse_args()
    with copied(options.data) as data, tempfile.TemporaryDirectory() as folder:
        helps, firsts = commands_of(options, data, Path(folder))
        seconds = {name: time_of(command, "") for name, command in firsts.items()}  # these scan
        print(", ".join(f"{name}: first step after {value:.2f} s with a scan" for name, value in seconds.items()))
        helping: dict[str, list[float]] = {name: [] for name in helps}
        stepping: dict[str, list[float]] = {name: [] for name in firsts}
        for _ in range(options.rounds):
            for name, command in helps.items():
                helping[name].append(time_of(command, None))
            for name, command in firsts.items():
                stepping[name].append(time_of(command, ""))
    rows = [
        Comparison("--help", "s", helping["ours"], helping.get("peer", [])),
        Comparison("first step, scanned before", "s", stepping["ours"], stepping.get("peer", [])),
    ]
    show(f"Start-up, {options.model}, {options.imgsz} px, batch {options.batch_size}", rows)


def commands_of(options: argparse.Namespace, data: Path, folder: Path) -> tuple[dict, dict]:
    helps = {"ours": [sys.executable, "train.py", "--help"]}
    shared = ["--data", str(data), "--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size)]
    shared += ["--workers", str(options.workers), "--device", "cpu", "--epochs", "2", "--project", str(folder)]
    ours = [sys.executable, "train.py", "--model", options.model, "--cache-dir", str(folder / "index"), "--noplots"]
    firsts = {"ours": [*ours, *shared]}
    if options.peer:
        helps["peer"] = [str(Path(options.peer).parent / "yolo"), "help"]
        side = str(PEER_SIDE)
        firsts["peer"] = [options.peer, side, "first-step", "--model", f"{options.model}.yaml", *shared]
    return helps, firsts


def time_of(command: Sequence[str], until: str | None) -> float:
    """Seconds until a command ends (None), or until it reports its first step, after which it is ended."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"YOLO_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines, seconds = [], None
    for line in process.stdout:
        lines.append(line)
        # A progress bar may stand before it in the same line.
        if until is not None and (MARK in line or FIRST_STEP in line):
            seconds = time.perf_counter() - started
            process.kill()
            break
    process.stdout.close()
    code = process.wait()
    if until is None and code == 0:
        return time.perf_counter() - started
    if seconds is None:
        sys.exit(f"{' '.join(command)} ended with {code}:\n{''.join(lines[-12:])}")
    return seconds


if __name__ == "__main__":
    main()
