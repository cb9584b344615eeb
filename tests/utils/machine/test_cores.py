"""Cores that this process may use: affinity, and CPU quotas of control groups, read from files as the kernel provides
them.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.loading.loader import WorkerSettings, _RequestLoader
from data.loading.worker_count import loader_workers, log_loader_workers
from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.pixels import RGB8
from utils.strings import counted


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def files(root: Path, **texts: str) -> Path:
    """Writes the named files below ``root``; in the names, __ stands for / and _dot_ for a dot."""
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "texts", "expected"),
    [
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu_dot_max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu_dot_max": "400000 100000\n"}, 4),  # docker --cpus 4
        ("0::/\n", {"cpu_dot_max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu_dot_max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu_dot_max": "6400000 100000\n"}, 16),  # no more than there are
        ("0::/job/step\n", {"job__cpu_dot_max": "600000 100000\n", "job__step__cpu_dot_max": "max 100000\n"}, 6),
        ("0::/job/step\n", {"job__cpu_dot_max": "600000 100000\n", "job__step__cpu_dot_max": "300000 100000\n"}, 3),
        ("0::/../other\n", {"cpu_dot_max": "500000 100000\n"}, 5),
        # Version 1, alone and in a container, which sees its own group as the root.
        (
            "4:cpu,cpuacct:/job\n",
            {"cpu__job__cpu_dot_cfs_quota_us": "300000\n", "cpu__job__cpu_dot_cfs_period_us": "100000\n"},
            3,
        ),
        (
            "4:cpu,cpuacct:/job\n0::/\n",
            {"cpu__cpu_dot_cfs_quota_us": "-1\n", "cpu__cpu_dot_cfs_period_us": "100000\n"},
            16,
        ),
        ("4:cpu:/docker/1a\n", {"cpu__cpu_dot_cfs_quota_us": "500000\n", "cpu__cpu_dot_cfs_period_us": "100000\n"}, 5),
    ],
)
def test_quotas_of_control_groups_limit_the_cores(tmp_path, cgroup, texts, expected):
    files(tmp_path, proc__self__cgroup=cgroup)
    files(tmp_path / "sys/fs/cgroup", **texts)
    assert available_cores(tmp_path) == expected


def test_without_control_groups_the_affinity_or_all_cores_count(tmp_path, monkeypatch):
    assert available_cores(tmp_path) == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cores(tmp_path) == 3


def on_node(processes: int, device: str) -> DistributedContext:
    return replace(DistributedContext.single(), local_world_size=processes, device=torch.device(device))


@pytest.mark.parametrize(("device", "has", "processes", "expected"), [
    ("cpu", 2, 1, 2), ("cpu", 2, 2, 1), ("cpu", 2, 4, 1), ("cpu", 16, 1, 8), ("cpu", 16, 4, 4), ("cpu", 7, 2, 3),
    ("cpu", 128, 8, 8), ("mps", 8, 1, 8),
    ("cuda", 16, 1, 14), ("cuda", 16, 4, 3), ("cuda", 2, 1, 1), ("cuda", 1, 2, 1), ("cuda", 128, 1, 16),
    ("cuda", 128, 8, 15),
])  # fmt: skip
def test_the_default_number_of_workers_is_an_equal_part_of_the_cores(
    monkeypatch, caplog, device, has, processes, expected
):
    monkeypatch.setattr("data.loading.worker_count.available_cores", lambda: has)
    with caplog.at_level(logging.INFO, logger="lockstep"):
        log_loader_workers(-1, on_node(processes, device), "val")
    assert loader_workers(-1, on_node(processes, device)) == expected
    where = f"{counted(has, 'core')}, {counted(processes, 'process')} on this node"
    assert f"{expected} per process ({where})" in caplog.text


def test_more_workers_than_cores_are_our_line_and_not_torchs(caplog, monkeypatch):
    monkeypatch.setattr("data.loading.worker_count.available_cores", lambda: 2)
    monkeypatch.setattr(get_logger(), "handlers", [])
    for requested in (1, 2):
        log_loader_workers(requested, on_node(2, "cpu"), "val")
        assert loader_workers(requested, on_node(2, "cpu")) == requested
    assert caplog.messages == ["--workers 2 (val): 4 workers on 2 cores; about one per core is fastest"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    samples = SimpleNamespace(reader=SimpleNamespace(index=SimpleNamespace(pixels=RGB8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _RequestLoader(samples, [], 1, WorkerSettings(9, make_batch=print))
