"""Signals that end a command: Ctrl-C, a terminal that closes, and those with which a scheduler takes the machine back.

A training saves at the next step and exits with a code by which the scheduler can requeue it. A second signal ends any
command at once. In a program that calls a command as a function (`in_users_program`), no signal ends the process while
the command runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from utils.errors import INTERRUPTED, REQUEUE, ExplainedError, Stopped, first_line

# SIGHUP: a terminal has closed. Windows has neither it nor SIGUSR1, and never sends SIGTERM.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)
# Signals within this time are one: a terminal's Ctrl-C reaches all processes, and launchers forward it again.
SAME_SIGNAL_S = 1.0
_PR_SET_PDEATHSIG = 1  # option of prctl(2)

_received: list[int] | None = None  # signals to the command in a user's program; None: the process is the command's own


@contextmanager
def in_users_program() -> Iterator[list[int]]:
    """Marks that a program of the user calls a command as a function during the block: a second signal raises
    KeyboardInterrupt, and handlers are always restored. Yields the signals that the command receives."""
    global _received
    previous = _received
    _received = []
    try:
        yield _received
    finally:
        _received = previous


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once. Scripts call it before their imports, which take seconds with torch. A
    Ctrl-C that is ignored, as in a shell's background job, stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def _exit(_: int, __: FrameType | None) -> None:
    os._exit(INTERRUPTED)


class StopSignals:
    """While entered, a signal raises `Stopped` in the main thread. Inside `deferred` it is only recorded. A second one
    ends the process at once.

    Signals that are ignored, such as SIGHUP under nohup, stay so, and so do handlers of the user's program.

    A bug after a signal is taken for its consequence, and becomes `Stopped`: a signal to all processes of a job also
    ends those of libraries, such as the compiler of ``--compile``.

    Args:
        numbers: signals to handle.
        before_end: called before a second signal ends the process.

    Attributes:
        number: the signal that was received, or 0.
        code: its exit code, or 0.
    """

    def __init__(
        self, numbers: Sequence[int] = STOP_SIGNALS, *, before_end: Callable[[], object] = lambda: None
    ) -> None:
        self.number = 0
        self.code = 0
        self._numbers = numbers
        self._before_end = before_end
        self._received_at = 0.0
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        is_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere, Python refuses handlers
        for number in self._numbers if is_main_thread else ():
            handler = signal.getsignal(number)
            is_ours = isinstance(getattr(handler, "__self__", None), StopSignals)
            if is_ours or handler in (signal.SIG_DFL, signal.default_int_handler, _exit):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # After a signal, a process of ours is ending: a launcher's next one must not interrupt that.
        is_ending = self.code and _received is None
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:  # another handler was set on purpose, and stays
                signal.signal(number, signal.SIG_IGN if is_ending else handler)
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
        now = time.monotonic()
        if self.code:
            if now - self._received_at > SAME_SIGNAL_S:
                self._before_end()
                if _received is not None:
                    raise KeyboardInterrupt
                os._exit(self.code)
            return
        self.number = number
        self.code = stop_code(-number)
        self._received_at = now
        if _received is not None:
            _received.append(number)
        if not self._deferred:
            if _imports_torch(frame):
                os._exit(self.code)
            raise Stopped(self.code)


def stop_code(status: int) -> int:
    """Returns the exit code of a command whose process a signal has stopped; 0 if none has. ``status``: exit status of
    the process; negative: the signal, which the process did not handle yet."""
    if status in (INTERRUPTED, -signal.SIGINT):
        return INTERRUPTED
    return REQUEUE if status == REQUEUE or -status in STOP_SIGNALS else 0


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
