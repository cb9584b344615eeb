"""Freed memory is reused without page faults, unless the user has configured the allocator; the memory that control
groups leave; and a shortage of space."""

import os
import platform
import subprocess
import sys

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.machine.resources import available_memory, check_space

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


MEMINFO = "MemTotal:       9000 kB\nMemFree:         100 kB\nMemAvailable:    5000 kB\n"
V1_UNLIMITED = "9223372036854771712"


def limited(limit: str, used: int, reclaimable: int = 0) -> dict[str, str]:
    """Returns the files of a control group of version 2."""
    stat = f"anon 1\ninactive_anon 7\ninactive_file {reclaimable}\nactive_file 3\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def limited_v1(limit: str, used: int, reclaimable: int = 0) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {reclaimable}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        ("0::/\n", {}, 5_120_000),
        ("0::/\n", {"": limited("max", 10)}, 5_120_000),
        ("0::/\n", {"": limited("10000", 4000)}, 6000),
        ("0::/\n", {"": limited("10000", 9900, reclaimable=7900)}, 8000),  # files that were read once
        ("0::/\n", {"": limited("10000", 10400)}, 0),  # a limit that was lowered
        ("0::/job/step\n", {"job/step": limited("10000", 4000), "job": limited("9000", 5000)}, 4000),
        ("0::/job/step\n", {"job/step": limited("max", 4000), "job": limited("9000", 5000)}, 4000),
        ("0::/docker/1a\n", {"": limited("10000", 4000)}, 6000),  # a container sees its group as the root
        ("5:memory:/job\n0::/\n", {"memory/job": limited_v1("10000", 9000, 500)}, 1500),
        ("5:memory:/docker/1a\n", {"memory": limited_v1("10000", 9000)}, 1000),
        ("5:memory:/job\n", {"memory/job": limited_v1(V1_UNLIMITED, 9000)}, 5_120_000),
        ("5:cpu:/job\n", {"memory/job": limited_v1("10000", 9000)}, 5_120_000),  # not of this controller
        ("5:memory:/job\n", {"memory/job": {"memory.limit_in_bytes": "no number"}}, 5_120_000),
    ],
)
def test_the_least_that_the_system_and_any_control_group_leave_is_available(tmp_path, cgroup, groups, expected):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    for group, content in groups.items():
        files |= {f"sys/fs/cgroup/{group}/{name}": text for name, text in content.items()}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory(tmp_path) == expected


def test_without_any_of_these_files_memory_is_unknown(tmp_path):
    assert available_memory(tmp_path) == sys.maxsize


def test_a_shortage_of_space_names_the_limit_and_not_only_what_is_free():
    """Of what is free, a part must stay free: without it, the message would say that there is enough."""
    check_space("--cache ram", 979, free=1000, place="memory", remedy="x")
    with refused("--cache ram: needs 990 B in memory, but may use only 98% of the 1 kB free; use --cache disk"):
        check_space("--cache ram", 990, free=1000, place="memory", remedy="use --cache disk")
