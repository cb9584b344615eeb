"""Ends a script without a traceback on Ctrl-C, even while it imports its modules."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from utils.process.exit_codes import INTERRUPTED

# Nothing else is imported here, because Ctrl-C prints a traceback until `exit_on_interrupt` is called.

IMPATIENT_S = 2.0  # a launcher repeats a terminal's Ctrl-C at once; a later one comes from an impatient user

_raised_at = -IMPATIENT_S


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once, with the exit code `INTERRUPTED`. Scripts call it before their imports,
    which take tenths of a second, or seconds with torch. An ignored Ctrl-C, as in a shell's background job, stays
    ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again after `exit_on_interrupt`, only once if a launcher repeats it. While
    torch is being imported, Ctrl-C still ends the process."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _raise)


def repeat_interrupt() -> None:
    """Repeats, a moment later, a Ctrl-C whose exception was lost in a callback."""
    import threading

    global _raised_at
    _raised_at = -IMPATIENT_S
    # Sent to the main thread: a signal to the timer's thread would not interrupt a blocking call.
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()


def imports_torch(frame: FrameType | None) -> bool:
    """Returns whether ``frame`` is inside an import and torch is not fully imported yet. The initialization of NumPy
    and torch loses exceptions of a signal handler, turns them into an ImportError, or aborts the process."""
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
