"""How many cores this process may use, and how many loader processes follow from that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from utils.logger import get_logger

# Of one rank. A worker draws about 600 images a second at 640 px; yolov8n on an H100 takes about 2,500.
MOST_WORKERS = 8


def available_cores(root: Path = Path("/")) -> int:
    """Cores that the system lets this process use, at least 1: those it may run on, and no more than the CPU quota of
    its control groups (``docker --cpus``, a batch system's) pays for, rounded down.

    Args:
        root: where /proc and /sys are.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *map(int, _quotas(root))]), 1)


def loader_workers(asked: int, processes: int) -> int:
    """``--workers`` as a number: ``asked``, or for -1 an equal share of the cores for each of the node's ``processes``,
    from 1 to `MOST_WORKERS`; the log says which."""
    if asked >= 0:
        return asked
    cores = available_cores()
    workers = min(max(cores // processes, 1), MOST_WORKERS)
    get_logger().info("--workers: %d a process (%d cores, %d process(es) on this node)", workers, cores, processes)
    return workers


def _quotas(root: Path) -> Iterator[float]:
    """Quotas, in cores, of the control groups that this process is in and of those around them, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # A container may see its own group as the root, under whatever name /proc has for it: then only that is there.
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(mount):
                break
            quota = _quota(folder, is_first_version=bool(controllers))
            if quota is not None:
                yield quota


def _quota(folder: Path, *, is_first_version: bool) -> float | None:
    """In cores; None without one."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first_version else ("cpu.max",)
    try:
        text = " ".join((folder / name).read_text(encoding="utf-8") for name in names)
        quota, period = map(int, text.split())
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None
