"""Identifies processes across machines and containers, and checks whether one has ended."""

from __future__ import annotations

import os
from pathlib import Path


def this_process() -> str:
    """Identifies this process for `has_died`."""
    return f"{os.getpid()} {_process_space()}"


def process_identity(pid: int) -> str:
    """Identifies a running process of this machine uniquely across machines (as far as /proc allows)."""
    try:
        started = process_stat(pid)[19]  # field 22, starttime
    except (OSError, IndexError):
        started = "?"
    return f"{os.uname().nodename} {_process_space()} {pid} {started}"


def has_died(process: str) -> bool:
    """Returns whether a process identified by `this_process` has ended, or False if it cannot be observed from here."""
    pid, space = process.split()
    return space == _process_space() and not _is_running(int(pid))


def _process_space() -> str:
    """Returns a string that is equal in processes that see each other's process ids. (Ranks may run in separate
    containers or on separate machines.)"""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    boot = boot_id()
    return f"{boot}/{namespace}" if boot and namespace else os.uname().nodename


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return process_stat(pid)[0] != "Z"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # it belongs to another user, or cannot be seen
        return True


def boot_id() -> str:
    """Returns an id that all processes of a machine share until it reboots, including in containers; "" without
    /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_stat(pid: int | str = "self") -> list[str]:
    """Returns the fields of /proc/PID/stat, beginning with the state (field 3 of proc(5)). Raises OSError if the file
    cannot be read."""
    content = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return content.rpartition(")")[2].split()  # the name, in parentheses, may contain anything
