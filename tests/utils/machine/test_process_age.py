"""How long a process has existed, as the process itself sees it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.machine.resources import process_age_s

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_the_age_counts_from_the_start_of_the_process():
    program = "import time; time.sleep(0.3); from utils.machine.resources import process_age_s; print(process_age_s())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.28 <= float(done.stdout) <= time.monotonic() - before + 0.02
    first = process_age_s()
    time.sleep(0.05)
    assert process_age_s() >= first + 0.05 - 1e-6
