"""Memory, open files, threads and processes do not grow over fifty epochs of a training.

Private memory is shared with no other process. PSS divides each shared page by the number of processes that map it, so
the sum over processes is the memory in use (Linux's smaps_rollup).
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model

EPOCHS = 50


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
            # Not the other pages of files, whose count depends on which programs have mapped them, too.
            sum(megabytes(child, "Private_Dirty") for child in found),
            sum(megabytes(child, field) for child in found for field in ("Pss_Anon", "Pss_Shmem")),
            sum(_entries(child, "fd") for child in found),
            sum(_entries(child, "task") for child in found),
            len(found),
        )


def _entries(process: int, folder: str) -> int:
    """Returns the number of entries of a folder of /proc; 0 if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return len(os.listdir(f"/proc/{process}/{folder}"))
    return 0


def megabytes(process: int, field: str) -> float:
    """Returns a field of smaps_rollup; 0 if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.M)[1]) / 1024
    return 0.0


def descendants(process: int) -> Iterator[int]:
    """Yields the ids of ``process`` and of all its descendants."""
    yield process
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return
    for child in children:
        yield from descendants(int(child))


def readings_by_epoch(flags: list[str], folder: Path) -> list[Reading]:
    """Returns the memory of a training by epoch, except for epochs during which the one before was still being read,
    and the last two, in which processes may be ending."""
    command = [sys.executable, "train.py", *flags, "--project", str(folder), "--name", "run"]
    command += ["--cache-dir", str(folder / "index")]
    results = folder / "run" / "results.csv"
    readings = []
    read_epoch = 0
    with open(folder / "log.txt", "w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None:
                epoch = len(results.read_text().splitlines()) - 1 if results.exists() else 0
                if read_epoch < epoch < EPOCHS - 1:
                    readings.append(Reading.of(process.pid))
                    read_epoch = epoch
                time.sleep(0.01)
        finally:
            process.terminate()
            code = process.wait()
    if code:
        sys.exit(f"the training ended with {code}:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return readings


def medians(readings: list[Reading]) -> list[Reading]:
    """Returns the medians over the last four sixths of the epochs: a checkpoint that is just being written takes memory
    for a moment. In the first epochs heaps fill, and pages shared with the parent are written for the first time."""
    size = len(readings) // 6
    windows = [readings[start : start + size] for start in range(len(readings) - 4 * size, len(readings), size)]
    return [Reading(*(statistics.median(column) for column in zip(*window))) for window in windows]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cache"), [(2, "ram"), (1, "none")])
def test_memory_files_and_processes_stay_constant_over_fifty_epochs(tmp_path: Path, ranks: int, cache: str):
    """A leak grows in every part of the run, a heap once."""
    data = write_dataset(tmp_path / "set", train=40)
    model = write_model(tmp_path / "tiny.yaml")
    flags = ["--data", data, "--model", model, *SMALL, "--workers", 2, "--cache", cache, "--epochs", EPOCHS]
    readings = readings_by_epoch([*map(str, flags), "--spawn", str(ranks)], tmp_path)
    assert len(readings) > EPOCHS // 2
    parts = medians(readings)
    print(f"{ranks} rank(s), --cache {cache}: {parts}")
    for field in ("private_mb", "pss_mb"):
        sizes = [getattr(part, field) for part in parts]
        assert min(late - early for early, late in pairwise(sizes)) < 0.02 * sizes[0], readings
        assert sizes[-1] < 1.3 * sizes[0], readings
    assert len({(part.files, part.threads, part.processes) for part in parts}) == 1, readings
