"""Memory and open files do not grow over fifty epochs of a training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.repository import ROOT
from tests.helpers.scripts import training, write_inputs

CALLBACK = """
import os, re
from pathlib import Path

def on_epoch(run):
    rollup = Path("/proc/self/smaps_rollup").read_text()
    kilobytes = sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\\d+)", rollup, re.MULTILINE)))
    with open("usage.txt", "a") as file:
        print(kilobytes, len(os.listdir("/proc/self/fd")), file=file)
"""


@pytest.mark.slow
def test_memory_and_files_stay_constant_over_fifty_epochs(tmp_path: Path):
    (tmp_path / "usage.py").write_text(CALLBACK)
    more = ["--epochs", 50, "--workers", 2, "--cache", "ram", "--callbacks", "usage:on_epoch"]
    command = [ROOT / "train.py", *training(write_inputs(tmp_path, train=40), tmp_path, *more)]
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True)
    usage = np.loadtxt(tmp_path / "usage.txt")
    memory, files = np.median(usage[16:24], 0)  # heaps are full by then
    memory_later, files_later = np.median(usage[-8:], 0)
    assert memory_later < 1.3 * memory
    assert files_later == files
