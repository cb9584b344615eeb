"""How long this process has existed."""

from __future__ import annotations

import os
import time


def process_age_s() -> float | None:
    """Seconds since the system started this process, the interpreter's start included; None where /proc doesn't tell.

    A process forked from another counts from its own start.
    """
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name in brackets may hold anything
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), seconds after boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, IndexError, ValueError):
        return None
