"""Signals that end a command: Ctrl-C, and those with which a scheduler takes the machine back.

A training saves at the next step and exits with a code by which the scheduler can requeue it. A second signal ends any
command at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from utils.errors import INTERRUPTED, REQUEUE, ExplainedError, Stopped, first_line

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Signals within this time are one: a terminal's Ctrl-C reaches all processes, and launchers forward it again.
SAME_SIGNAL_S = 1.0
_PR_SET_PDEATHSIG = 1  # option of prctl(2)


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once. Scripts call it before their imports, which take seconds with torch. A
    Ctrl-C that is ignored, as in a shell's background job, stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Makes the first Ctrl-C raise KeyboardInterrupt after `exit_on_interrupt`; a second one ends the process."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _Interrupt())


class StopSignals:
    """While entered, a signal raises `Stopped` in the main thread. Inside `deferred` it only sets ``code``. A second
    one ends the process at once.

    A bug after a signal is taken for its consequence, and becomes `Stopped`: a signal to all processes of a job also
    ends those of libraries, such as the compiler of ``--compile``.
    """

    def __init__(self) -> None:
        self.code = 0  # exit code of the signal that was received, or 0
        self._received_at = 0.0
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:  # another handler was set on purpose, and stays
                # After a signal, the process is ending: a launcher's next one must not interrupt that.
                signal.signal(number, signal.SIG_IGN if self.code else handler)
        if self.code and isinstance(error, Exception) and not isinstance(error, ExplainedError):
            from utils.logger import get_logger

            get_logger().info("stopped by a signal (%s: %s)", type(error).__name__, first_line(error))
            raise Stopped(self.code) from error

    @property
    def received(self) -> bool:
        """True if a signal has been received."""
        return self.code != 0

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Records a signal in the block instead of raising. The block looks at `code` itself."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.code:
            if time.monotonic() - self._received_at > SAME_SIGNAL_S:
                os._exit(self.code)
            return
        self.code = INTERRUPTED if number == signal.SIGINT else REQUEUE
        self._received_at = time.monotonic()
        if not self._deferred:
            if _imports_torch(frame):
                os._exit(self.code)
            raise Stopped(self.code)


class _Interrupt:
    """A handler of Ctrl-C, see `raise_on_interrupt`."""

    def __init__(self) -> None:
        self._received_at = 0.0

    def __call__(self, _: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = not self._received_at
        if _imports_torch(frame) or (not is_first and now - self._received_at > SAME_SIGNAL_S):
            os._exit(INTERRUPTED)
        if is_first:
            self._received_at = now
            raise KeyboardInterrupt


def _exit(_: int, __: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _imports_torch(frame: FrameType | None) -> bool:
    """Returns whether ``frame`` is inside an import and torch is not fully imported yet. The initialization of NumPy
    and torch loses exceptions of a signal handler, or aborts; there is nothing to save yet."""
    torch = sys.modules.get("torch")
    if torch is not None and not getattr(torch.__spec__, "_initializing", False):
        return False
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


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


def killed_by(number: int) -> str:
    """Describes how a signal ended a process."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        name = f"signal {number}"
    hint = {"SIGKILL": "; is there enough memory?", "SIGBUS": "; is /dev/shm or the disk full?"}.get(name, "")
    return f"killed by {name}{hint}"
