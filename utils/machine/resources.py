"""The cores, memory and disk space that this process may use."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from utils.errors import UserError
from utils.strings import format_bytes

_USABLE_FRACTION = 0.98  # fraction of the free memory or disk space that a cache or a copy may take (`check_space`)


def available_cores(root: Path = Path("/")) -> int:
    """Counts the cores that this process may use: its CPU affinity, limited by the CPU quotas of its control group
    (``docker --cpus``, a batch system), rounded down, but at least 1. ``root`` contains /proc and /sys."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *map(int, _quotas(root))]), 1)


def _quotas(root: Path) -> Iterator[float]:
    """Yields the CPU quotas, in cores, of this process's control groups and their parents."""
    for folder in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
            yield quota / period
    for folder in _control_groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
            period = int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
            if quota > 0:  # -1 means no quota
                yield quota / period


def _control_groups(root: Path, controller: str = "") -> Iterator[Path]:
    """Yields the folders of this process's control group and its parents, for cgroup v2, or for a v1 ``controller``.
    They need not exist: in a container that sees its own group as the root, whatever its name in /proc, only the root
    does."""
    mount = root / "sys/fs/cgroup" / controller
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
            if controller in controllers.split(","):
                own_group = mount / path.lstrip("/")
                yield from (folder for folder in (own_group, *own_group.parents) if folder.is_relative_to(mount))


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that this process can still allocate within the limits of the system and its control groups, or
    ``sys.maxsize`` if unknown. ``root`` contains /proc and /sys."""
    return max(min([sys.maxsize, *_free_in_system(root), *_free_in_groups(root)]), 0)


def _free_in_system(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, LookupError, ValueError):
        yield _named_number(root / "proc/meminfo", "MemAvailable:") * 1024


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yields the bytes left below each control group's limit. The kernel counts the page cache as used memory, but
    reclaims its inactive part before it refuses an allocation."""
    versions = (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for controller, limit_name, used_name, reclaimable_name in versions:
        for folder in _control_groups(root, controller):
            with contextlib.suppress(OSError, LookupError, ValueError):  # no such group, or no limit ("max")
                limit = int((folder / limit_name).read_text(encoding="utf-8"))
                used = int((folder / used_name).read_text(encoding="utf-8"))
                yield limit - used + _named_number(folder / "memory.stat", reclaimable_name)


def _named_number(path: Path, name: str) -> int:
    """Returns the number after ``name`` in a file of lines with a name and a number. Raises OSError or ValueError, or
    LookupError if there is no such name."""
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise LookupError(name)


def check_space(
    title: str, size: int, *, free: int, place: Path | str, remedy: str, fraction: float = _USABLE_FRACTION
) -> None:
    """Raises UserError unless ``size`` bytes fit into ``fraction`` of the ``free`` bytes of ``place``. ``title``,
    ``remedy``: start and end of the message."""
    if size > fraction * free:
        raise UserError(
            f"{title}: needs {format_bytes(size)} in {place}, but may use only {fraction:.0%} of the "
            f"{format_bytes(free)} free; {remedy}"
        )
