"""Freed memory is reused without page faults, unless the user has configured the allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT

PROGRAM = """
import resource
from utils.machine.malloc import keep_freed_memory

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
    done = subprocess.run(command, env=plain | setting, cwd=ROOT, capture_output=True, text=True, check=True)
    faults = int(done.stdout)  # 24,576 pages of 4 KiB, or 48 of 2 MiB
    assert faults < 10 if kept else faults > 20
