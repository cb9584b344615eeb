"""Signals between a process and its children: ends a child with its parent, and names the signal that ended a child."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # of prctl(2)
# Signals with which the kernel or the C library ends a process because of an error in its own code.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)


def is_crash(number: int) -> bool:
    """Returns whether a signal that ended a process means an error in its code rather than a signal from outside."""
    return number in _CRASHES


def killed_by(number: int) -> str:
    """Describes how a signal ended a process."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        name = f"signal {number}"
    advice = "; is there enough memory?" if number == signal.SIGKILL else ""
    return f"killed by {name}{advice}"


def end_with_parent(number: int = signal.SIGINT) -> Callable[[], None]:
    """Returns a function that makes the kernel send a signal to the calling process when its parent is killed. It does
    nothing on systems without Linux's prctl(2).

    libc's function is looked up here rather than in the returned function: between fork and exec, in a program with
    threads, the look-up could wait forever for a lock of the loader.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if os.name == "posix" else None

    def end() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(number))

    return end
