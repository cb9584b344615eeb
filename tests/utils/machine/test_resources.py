"""Cores that this process may use, by affinity and control groups; the memory that control groups leave; and a shortage
of space. The files of control groups are as the kernel provides them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.machine.resources import available_cores, available_memory

MEMINFO = "MemTotal:       9000 kB\nMemFree:         100 kB\nMemAvailable:    5000 kB\n"
V1_UNLIMITED = "9223372036854771712"


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def system(root: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> Path:
    """Writes the files of control groups below ``root``. ``cgroup``: that of /proc/self."""
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    files |= {
        f"sys/fs/cgroup/{group}/{name}": text for group, content in groups.items() for name, text in content.items()
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def quota_v1(quota: int) -> dict[str, str]:
    return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        ("0::/\n", {}, 16),
        ("0::/\n", {"": {"cpu.max": "250000 100000\n"}}, 2),  # docker --cpus 2.5
        ("0::/\n", {"": {"cpu.max": "50000 100000\n"}}, 1),
        ("0::/job/step\n", {"job": {"cpu.max": "600000 100000\n"}, "job/step": {"cpu.max": "max 100000\n"}}, 6),
        # Version 1, alone and in a container, which sees its own group as the root.
        ("4:cpu,cpuacct:/job\n", {"cpu/job": quota_v1(300000)}, 3),
        ("4:cpu,cpuacct:/job\n0::/\n", {"cpu": quota_v1(-1)}, 16),
    ],
)
def test_quotas_of_control_groups_limit_the_cores(tmp_path, cgroup, groups, expected):
    assert available_cores(system(tmp_path, cgroup, groups)) == expected


def test_without_control_groups_the_affinity_or_all_cores_count(tmp_path, monkeypatch):
    assert available_cores(tmp_path) == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cores(tmp_path) == 3


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
        ("0::/\n", {"": limited("10000", 9900, reclaimable=7900)}, 8000),  # files that were read once
        ("0::/\n", {"": limited("10000", 10400)}, 0),  # a limit that was lowered
        ("0::/job/step\n", {"job/step": limited("max", 4000), "job": limited("9000", 5000)}, 4000),
        ("0::/docker/1a\n", {"": limited("10000", 4000)}, 6000),  # a container sees its group as the root
        ("5:memory:/job\n0::/\n", {"memory/job": limited_v1("10000", 9000, 500)}, 1500),
        ("5:memory:/job\n", {"memory/job": limited_v1(V1_UNLIMITED, 9000)}, 5_120_000),
    ],
)
def test_the_least_that_the_system_and_any_control_group_leave_is_available(tmp_path, cgroup, groups, expected):
    assert available_memory(system(tmp_path, cgroup, groups)) == expected
