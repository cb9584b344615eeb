"""SIGTERM, SIGUSR1 and SIGINT, noted: the training ends itself at a step boundary, with its state saved."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from utils.errors import Stopped

REQUEUE, INTERRUPTED = 75, 130  # exit codes: EX_TEMPFAIL of sysexits.h; what shells give after Ctrl-C
IMPATIENT_S = 2.0  # a launcher repeats a terminal's Ctrl-C at once; a second one later than this is a person's


class StopSignals:
    """While entered, a signal raises `Stopped` in the main thread; inside `deferred` it is only noted.

    A second Ctrl-C, some seconds after the first, raises at once. Repeated SIGTERM and SIGUSR1 change nothing.
    """

    def __init__(self) -> None:
        self.stop = False  # SIGTERM or SIGUSR1 has come
        self.interrupt = False  # SIGINT has come
        self._deferred = False
        self._interrupted_at = 0.0
        self._previous: dict[int, Any] = {}
        self._wires: tuple[socket.socket, socket.socket] | None = None
        self._pid = 0

    def __enter__(self) -> StopSignals:
        self._pid = os.getpid()
        self._wires = socket.socketpair()
        for wire in self._wires:
            wire.setblocking(False)
        signal.set_wakeup_fd(self._wires[1].fileno(), warn_on_full_buffer=False)
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        stopping = self.stop or self.interrupt  # then nothing may cut short what is left to do
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if stopping else handler)
        signal.set_wakeup_fd(-1)
        for wire in self._wires or ():
            wire.close()
        self._wires = None

    @property
    def code(self) -> int:
        """The exit code that the signals so far ask for."""
        return INTERRUPTED if self.interrupt else REQUEUE

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, signals are noted and nothing is raised; what came before has raised already. A process that is
        stopping does not leave this state again."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = self.stop or self.interrupt

    def has_come(self) -> bool:
        """True if a signal has come since the last call, even if the main thread is stuck in foreign code and has not
        noted it. For one watching thread."""
        received = b""
        with suppress(BlockingIOError, OSError):
            while self._wires and (chunk := self._wires[0].recv(4096)):
                received += chunk
        return any(number in stop_signals() for number in received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child that has not set itself up yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        impatient = number == signal.SIGINT and self.interrupt and now - self._interrupted_at > IMPATIENT_S
        if number == signal.SIGINT:
            self._interrupted_at = self._interrupted_at if self.interrupt else now
            self.interrupt = True
        else:
            self.stop = True
        if impatient or not self._deferred:
            self._deferred = True
            raise Stopped(self.code)


def stop_signals() -> tuple[int, ...]:
    """The signals that ask a run to stop, on this system."""
    names = ("SIGTERM", "SIGUSR1", "SIGINT")
    return tuple(int(getattr(signal, name)) for name in names if hasattr(signal, name))
