"""Ends a script without a traceback on Ctrl-C, even while it imports its modules."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from utils.process.exit_codes import INTERRUPTED

# Nothing else is imported here: until `exit_on_interrupt` has been called, Ctrl-C prints a traceback.

IMPATIENT_S = 2.0  # a launcher repeats a terminal's Ctrl-C at once; a later second one comes from a user

_raised_at = -IMPATIENT_S


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once, with its exit code. Scripts call it before their imports, which take
    tenths of a second, or seconds with torch. A Ctrl-C that is ignored, as in the background of a shell, stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again after `exit_on_interrupt`, once if a launcher repeats it. While torch
    is being imported it still ends the process."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _raise)


def repeat_interrupt() -> None:
    """Repeats, a moment later, a Ctrl-C whose exception was lost in a callback of the garbage collector."""
    import threading

    global _raised_at
    _raised_at = -IMPATIENT_S
    # To the main thread: a signal to the timer's own would not end a call that waits.
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()


def imports_torch(frame: FrameType | None) -> bool:
    """Returns whether an import is running in ``frame`` that comes before torch is complete. The initialization of
    NumPy and torch loses exceptions of a signal handler, turns them into an ImportError, or aborts the process."""
    torch = sys.modules.get("torch")
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):
        return False
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _exit(_: int, __: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _raise(_: int, frame: FrameType | None) -> None:
    global _raised_at
    if imports_torch(frame):
        os._exit(INTERRUPTED)
    now = time.monotonic()
    if now - _raised_at < IMPATIENT_S:
        return
    _raised_at = now
    raise KeyboardInterrupt
