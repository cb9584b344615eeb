"""Signals between a process and its children: ends a child with its parent, and names the signal that ended a child."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from utils.machine.limits import Cause

_PR_SET_PDEATHSIG = 1  # option of prctl(2)
# Signals with which the kernel ends a process because of an error in its own code.
_CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
_ADVICE: dict[int, str] = {signal.SIGKILL: "is there enough memory?", signal.SIGBUS: "is /dev/shm or the disk full?"}


def cause_of_signal(number: int) -> Cause:
    """Returns the cause of a death by this signal.

    | signal | reason | cause |
    | --- | --- | --- |
    | SIGSEGV and other `_CRASHES` | an error in the code | COMMAND |
    | SIGBUS | no space for a page of a mapped file or of /dev/shm | LOST_PROCESS |
    | SIGABRT | NCCL after a failure of another process or a GPU, or a library without memory | LOST_PROCESS |
    | SIGKILL and others | the kernel, if memory runs out, or a user | LOST_PROCESS |
    """
    return Cause.COMMAND if number in _CRASHES else Cause.LOST_PROCESS


def killed_by(number: int) -> str:
    """Describes how a signal ended a process."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        name = f"signal {number}"
    advice = _ADVICE.get(number)
    return f"killed by {name}; {advice}" if advice else f"killed by {name}"


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
