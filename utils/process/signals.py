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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from utils.errors import INTERRUPTED, REQUEUE, ExplainedError, Stopped, first_line

# SIGHUP: a terminal has closed. Windows has neither it nor SIGUSR1, and never sends SIGTERM.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)
# Signals within this time are one: a terminal's Ctrl-C reaches all processes, and launchers forward it again.
SAME_SIGNAL_S = 1.0
_PR_SET_PDEATHSIG = 1  # option of prctl(2)


@dataclass
class UsersProgram:
    """The process in which a command runs, if that is another program's."""

    handled: tuple[signal.Signals, ...]  # signals that the command may handle
    received: int = 0  # number of the signal that has stopped the command, or 0


_users_program: UsersProgram | None = None  # None: the process is the command's own


@contextmanager
def in_users_program() -> Iterator[UsersProgram]:
    """Marks that a program of the user calls a command as a function during the block.

    The command handles only the signals that the program leaves at their default, and none outside of the main thread,
    where Python refuses handlers. A second signal raises KeyboardInterrupt.
    """
    global _users_program
    handled: tuple[signal.Signals, ...] = ()
    if threading.current_thread() is threading.main_thread():
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        handled = tuple(number for number in STOP_SIGNALS if signal.getsignal(number) in defaults)
    previous = _users_program
    _users_program = UsersProgram(handled)
    try:
        yield _users_program
    finally:
        _users_program = previous


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Makes ``handler`` handle the signals that stop a command, except those that are ignored, such as SIGHUP under
    nohup. Returns their previous handlers by number."""
    numbers = STOP_SIGNALS if _users_program is None else _users_program.handled
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


def note_signal(number: int) -> None:
    """Records the first signal that stops the command, for the program that has called it."""
    if _users_program is not None:
        _users_program.received = _users_program.received or number


def end_at_once(code: int) -> NoReturn:
    """Ends the process, or only the command in a user's program, at a second signal."""
    if _users_program is not None:
        raise KeyboardInterrupt
    os._exit(code)


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
    one ends the process at once (`end_at_once`).

    A bug after a signal is taken for its consequence, and becomes `Stopped`: a signal to all processes of a job also
    ends those of libraries, such as the compiler of ``--compile``.
    """

    def __init__(self) -> None:
        self.code = 0  # exit code of the signal that was received, or 0
        self._received_at = 0.0
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = handle_stop_signals(self._handle)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:  # another handler was set on purpose, and stays
                # After a signal, a process of ours is ending: a launcher's next one must not interrupt that.
                is_ending = self.code and _users_program is None
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
        if self.code:
            if time.monotonic() - self._received_at > SAME_SIGNAL_S:
                end_at_once(self.code)
            return
        note_signal(number)
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
