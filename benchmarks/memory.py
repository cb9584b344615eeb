"""Memory of a training's processes: constant over the epochs, and one image cache per machine.

    python -m benchmarks.memory --data coco128.yaml --ranks 2 --workers 4             # with and without --cache ram
    python -m benchmarks.memory --data coco128.yaml --training --ranks 2 --epochs 50  # early and late in a training

Private memory is shared with no other process. PSS divides each shared page by the number of processes that map it, so
the sum over processes is the memory in use (Linux's smaps_rollup).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.speed.turns import ROOT

TIMES = 8  # copies of the training images, for a cache that is large beside the noise


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True, help="data set with YOLO labels")
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=50, help="of --training")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="before it is measured, without --training")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--training", action="store_true", help="memory over epochs, not of a cache")
    options = parser.parse_args()
    print((memory_of_training if options.training else cache_of_a_machine)(options))


class Reading(NamedTuple):
    """The memory of a process and all its descendants together."""

    private_mb: float
    pss_mb: float
    files: int  # open
    threads: int
    processes: int

    @classmethod
    def of(cls, process: int) -> Reading:
        found = list(descendants(process))
        return cls(
            sum(map(private_mb, found)),
            sum(map(pss_mb, found)),
            sum(_entries(child, "fd") for child in found),
            sum(_entries(child, "task") for child in found),
            len(found),
        )


def _entries(process: int, folder: str) -> int:
    """The number of entries of a folder of /proc; 0 if the process has ended."""
    try:
        return len(os.listdir(f"/proc/{process}/{folder}"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def private_mb(process: int | str = "self") -> float:
    """Written pages; others of files count as shared or not, as it happens, with who else has mapped them."""
    return sum(_rollup(process, ("Private_Dirty",)).values()) / 1024


def pss_mb(process: int) -> float:
    return sum(_rollup(process, ("Pss",)).values()) / 1024


def _rollup(process: int | str, fields: tuple[str, ...]) -> dict[str, int]:
    """kB by field; empty if the process has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M) if name in fields}


def descendants(process: int) -> Iterator[int]:
    """``process`` and all its descendants."""
    yield process
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return
    for child in children:
        yield from descendants(int(child))


def cache_of_a_machine(options: argparse.Namespace) -> str:
    """PSS of a training with several ranks, without and with ``--cache ram``, against one cache's size."""
    from benchmarks.speed.dataset_copy import copied

    with copied(options.data, times=options.times) as data, tempfile.TemporaryDirectory() as folder:
        without, _ = _pss_of_training(options, data, Path(folder), "none")
        with_cache, cache = _pss_of_training(options, data, Path(folder), "ram")
    share = (with_cache - without) / cache
    return (
        f"PSS of {options.ranks} ranks with {options.workers} workers each: {without:.0f} MB without cache, "
        f"{with_cache:.0f} MB with --cache ram of {cache:.0f} MB: {share:.2f} of one cache more "
        f"({'within' if share <= 1.1 else 'ABOVE'} 1.1)."
    )


def memory_of_training(options: argparse.Namespace) -> str:
    """Of a training with ``--cache ram``, after epoch 5 (or the first, of fewer) and before the last."""
    from benchmarks.speed.dataset_copy import copied

    with copied(options.data, times=options.times) as data, tempfile.TemporaryDirectory() as folder:
        flags = ["--data", str(data), "--model", options.model, "--imgsz", str(options.imgsz), "--device", "cpu"]
        flags += ["--batch-size", str(options.batch_size), "--workers", str(options.workers), "--cache", "ram"]
        flags += ["--epochs", str(options.epochs), "--spawn", str(options.ranks), "--noplots"]
        readings = readings_by_epoch(flags, Path(folder))
    early, late = early_and_late(readings)
    return (
        f"{options.epochs} epochs of {options.ranks} rank(s) with {options.workers} workers each and --cache "
        f"ram, all {early.processes} processes: private {early.private_mb:.1f} MB early and {late.private_mb:.1f} MB "
        f"late, PSS {early.pss_mb:.1f} and {late.pss_mb:.1f} MB, open files {early.files} and {late.files}, threads "
        f"{early.threads} and {late.threads}."
    )


def readings_by_epoch(flags: list[str], folder: Path) -> list[Reading]:
    """The memory of a training whenever its results have a new epoch, by epoch; some of the last may be missing."""
    command = [sys.executable, "train.py", *flags, "--project", str(folder), "--name", "run"]
    command += ["--cache-dir", str(folder / "index")]
    results, readings = folder / "run" / "results.csv", []
    with open(folder / "log.txt", "w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while process.poll() is None:
                if results.exists() and len(results.read_text().splitlines()) - 1 > len(readings):
                    readings.append(Reading.of(process.pid))
                time.sleep(0.01)
        finally:
            process.terminate()
            code = process.wait()
    if code:
        sys.exit(f"the training ended with {code}:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return readings


def early_and_late(readings: list[Reading]) -> tuple[Reading, Reading]:
    """Medians over five epochs from the middle on, and over the last five but one, in which processes may be ending: a
    checkpoint that is just being written takes memory for a moment. In the first epochs heaps fill, and pages shared
    with the parent are written for the first time, ever more slowly."""
    start = len(readings) // 2 if len(readings) > 14 else 0
    windows = readings[start : start + 5], readings[-6:-1]
    early, late = (Reading(*(statistics.median(column) for column in zip(*window))) for window in windows)
    return early, late


def _pss_of_training(options: argparse.Namespace, data: Path, folder: Path, cache: str) -> tuple[float, float]:
    """The largest sum over its processes seen in the steps after the first ``options.steps``, and the cache's MB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    command += ["train.py", "--data", str(data), "--model", options.model, "--imgsz", str(options.imgsz)]
    command += ["--batch-size", str(options.batch_size), "--workers", str(options.workers), "--cache", cache]
    command += ["--device", "cpu", "--epochs", "1000", "--val-every", "0", "--noplots", "--save-steps", "1"]
    command += ["--project", str(folder), "--name", cache, "--cache-dir", str(folder / "index")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    largest = size = 0.0
    with open(folder / f"{cache}.log", "w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_for_steps(process, folder / cache / "last.pt", options.steps, folder / f"{cache}.log")
            for _ in range(20):
                largest = max(largest, sum(pss_mb(child) for child in descendants(process.pid)))
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
        if cache != "none":
            text = (folder / f"{cache}.log").read_text()
            size = float(re.search(r"--cache ram: \d+ images, ([\d.]+) GiB", text)[1]) * 1024
    return largest, size


def _wait_for_steps(process: subprocess.Popen, checkpoint: Path, steps: int, log: Path) -> None:
    """Waits until the checkpoint of this many steps has been written (one is written after each)."""
    seen, stamp = 0, 0
    while seen < steps:
        if process.poll() is not None:
            sys.exit(f"the training ended:\n{log.read_text()[-2000:]}")
        now = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        seen, stamp = seen + (now != stamp), now
        time.sleep(0.05)


if __name__ == "__main__":
    main()
