"""Freed memory is reused without page faults, unless the user has configured the allocator; the age of a process."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.machine.resources import process_age_s

PROGRAM = """
import resource
from utils.machine.resources import keep_freed_memory

keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(96 * 2**20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(("setting", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "1048576"}, False)])
def test_a_large_block_comes_without_page_faults(setting, kept):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=plain | setting, cwd=root, capture_output=True, text=True, check=True)
    faults = int(done.stdout)  # 24,576 pages of 4 KiB, or 48 of 2 MiB
    assert faults < 10 if kept else faults > 20


AGE = "import time; time.sleep(0.3); from utils.machine.resources import process_age_s; print(process_age_s())"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_the_age_counts_from_the_start_of_the_process():
    before, root = time.monotonic(), Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", AGE], cwd=root, capture_output=True, text=True, check=True)
    assert 0.28 <= float(done.stdout) <= time.monotonic() - before + 0.02
    first = process_age_s()
    time.sleep(0.05)
    assert process_age_s() >= first + 0.05 - 1e-6
