"""Memory and open files do not grow over fifty epochs of a training.

Memory is the PSS of all processes of a run, which divides each shared page by the number of processes that map it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model

EPOCHS = 50


def usage(session: int) -> tuple[float, int]:
    """Returns the memory in kB and the number of open files of all processes of a session."""
    memory = files = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            if stat.read_text().rsplit(")", 1)[1].split()[3] == str(session):
                rollup = (stat.parent / "smaps_rollup").read_text()
                memory += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", rollup, re.MULTILINE)))
                files += len(os.listdir(stat.parent / "fd"))
    return memory, files


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cache"), [(2, "ram"), (1, "none")])
def test_memory_and_files_stay_constant_over_fifty_epochs(tmp_path, ranks, cache):
    flags = ["--data", write_dataset(tmp_path / "set", train=40), "--model", write_model(tmp_path / "tiny.yaml")]
    flags += [*SMALL, "--workers", 2, "--cache", cache, "--epochs", EPOCHS, "--spawn", ranks, "--project", tmp_path]
    table = tmp_path / "exp" / "results.csv"
    readings = {}
    with subprocess.Popen([sys.executable, "train.py", *map(str, flags)], cwd=ROOT, start_new_session=True) as process:
        while process.poll() is None:
            epoch = len(table.read_text().splitlines()) if table.exists() else 0
            # Heaps fill in the first epochs, processes end in the last.
            if EPOCHS - 34 < epoch < EPOCHS - 1 and epoch not in readings:
                readings[epoch] = usage(process.pid)
            time.sleep(0.01)
    assert process.returncode == 0
    late = np.array([readings[epoch] for epoch in sorted(readings)])
    (memory, files), (memory_later, files_later) = np.median(late[:8], 0), np.median(late[-8:], 0)
    assert memory_later < 1.3 * memory, readings
    assert files_later == files, readings
