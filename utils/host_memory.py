"""How the C library handles memory that the program has freed."""

from __future__ import annotations

import ctypes
import os

# Of mallopt(3), from glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**31 - 1  # mallopt takes an int
_OLDER_LIMIT = 2**25
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Lets this process and its children reuse the memory they free, instead of asking the system for it again.

    By default glibc hands large blocks back. A training step on a CPU frees all its feature maps, so the next step met
    20,000 page faults, one after another, while its threads waited: 15 % of its time (benchmarks/README.md). The
    process now stays as large as its largest step. Does nothing under another C library, or where the user has set
    malloc's environment variables.
    """
    if any(name in os.environ for name in _USERS_OWN):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return
    if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):  # older versions refuse more than half of a heap
        mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
