"""The cores and the memory that this process may use, and what its CPU can do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """Counts the cores that this process may use, at least 1: its CPU affinity, limited by the CPU quotas of its
    control group (``docker --cpus``, a batch system), rounded down. ``root`` contains /proc and /sys."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *map(int, _quotas(root))]), 1)


def _quotas(root: Path) -> Iterator[float]:
    """Yields the CPU quotas, in cores, of this process's control group (version 2) and of its parents."""
    mount = root / "sys/fs/cgroup"
    try:
        path = (root / "proc/self/cgroup").read_text(encoding="utf-8").rpartition("0::")[2].strip()
    except OSError:
        return
    # A container may see its own group as the root, whatever its name in /proc is. Then only the root exists.
    own_group = mount / path.lstrip("/")
    for folder in (own_group, *own_group.parents):
        if not folder.is_relative_to(mount):
            break
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
            yield quota / period


def available_memory() -> int:
    """Returns the bytes that this process can still allocate, by the system and its control group; ``sys.maxsize`` if
    unknown."""
    available = sys.maxsize
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" in a container without a limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
        available = min(available, limit - used)
    return available


# Constants of mallopt(3), from glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1  # mallopt takes an int
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Makes this process and its children reuse freed memory instead of returning it to the system, unless the user has
    set malloc's environment variables.

    By default, glibc returns large blocks. A training step on a CPU frees all its feature maps, and the 20,000 page
    faults of the next step took 15 % of its time (benchmarks/LOG.md).
    """
    if any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for limit in (2**25, _KEPT_BYTES):  # older versions refuse more than half of a heap
            mallopt(_M_MMAP_THRESHOLD, limit)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def cpu_multiplies_bf16() -> bool:
    """Returns whether the CPU has matrix instructions for bfloat16; without them it is emulated, many times slower.

    Not timed at start-up: with another busy process, timings went either way (0.5 to 2.0 times float32 in five tries),
    and the same command must give the same run.
    """
    import torch

    if hasattr(torch.cpu, "get_capabilities"):  # torch >= 2.11
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
