"""Ends a script without a traceback when Ctrl-C comes while it is still importing its modules."""

from __future__ import annotations

import os
import signal

# No other imports: until `exit_on_interrupt` has been called, Ctrl-C still prints a traceback.

INTERRUPTED = 130  # exit code after Ctrl-C, as in shells


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once, with its exit code. Scripts call it before their imports, which take
    tenths of a second, or seconds with torch. A Ctrl-C that is ignored, as in the background of a shell, stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(_: int, __: object) -> None:
    os._exit(INTERRUPTED)
