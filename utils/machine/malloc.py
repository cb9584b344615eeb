"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes
import os

# Constants of mallopt(3), from glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1  # mallopt takes an int
_DEFAULT_BYTES = 2**25  # the largest block that glibc comes to keep by itself
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Makes this process and its forks reuse freed memory instead of returning it to the system, unless the user has
    set malloc's environment variables.

    By default, glibc returns large blocks to the system. A training step on a CPU frees all its feature maps, and the
    20,000 page faults of the next step took 15 % of its time (benchmarks/LOG.md).
    """
    if os.name != "posix" or any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for limit in (_DEFAULT_BYTES, _KEPT_BYTES):  # older versions refuse more than half of a heap
            mallopt(_M_MMAP_THRESHOLD, limit)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Ends `keep_freed_memory`: returns what is free to the system, and from now on what is freed."""
    if os.name != "posix":
        return
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _MALLOC_VARIABLES):
        mallopt(_M_MMAP_THRESHOLD, _DEFAULT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _DEFAULT_BYTES)
    trim = getattr(libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
