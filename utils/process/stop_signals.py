"""Handles SIGTERM, SIGUSR1 and SIGINT, so that training can stop at a step boundary with its state saved."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from utils.errors import Stopped
from utils.process.exit_codes import INTERRUPTED, REQUEUE
from utils.process.interrupts import IMPATIENT_S, imports_torch


class StopSignals:
    """While entered, a signal raises `Stopped` in the main thread. Inside `deferred` it is only recorded.

    A second Ctrl-C, some seconds after the first, raises at once. Repeated SIGTERM and SIGUSR1 have no effect. After
    `ignore_requeue`, only Ctrl-C has an effect.
    """

    def __init__(self) -> None:
        self.requeue = False  # SIGTERM or SIGUSR1 was received: a batch system wants the machine
        self.interrupt = False  # SIGINT was received
        self._deferred = False
        self._ignores_requeue = False
        self._interrupted_at = 0.0
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None  # receives signal numbers

    def __enter__(self) -> StopSignals:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        stopping = self.received  # the remaining work must then not be interrupted
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:  # another handler was set on purpose, and stays
                signal.signal(number, signal.SIG_IGN if stopping else handler)
        signal.set_wakeup_fd(-1)
        for end in self._pipe or ():
            os.close(end)
        self._pipe = None

    @property
    def received(self) -> bool:
        """True if any of the signals has been received."""
        return self.requeue or self.interrupt

    @property
    def code(self) -> int:
        """The exit code of a process that these signals stopped."""
        return INTERRUPTED if self.interrupt else REQUEUE

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Records signals in the block instead of raising. A process that is stopping stays in this state, as does one
        that fails in the block, so that a launcher's signal does not interrupt its exit."""
        self._deferred = True
        yield
        self._deferred = self.received and not self._ignores_requeue

    def ignore_requeue(self) -> None:
        """Ignores SIGTERM and SIGUSR1 until the end of the block; Ctrl-C raises at once, also inside `deferred`. Call
        this when training is done: a requeued job would only write the report and the exports that this process is
        about to write."""
        self._ignores_requeue = True
        self._deferred = False

    def drain(self) -> bool:
        """Consumes the signals since the last call, including those received while the main thread is blocked. Returns
        whether there were any. Only one thread may call this."""
        with suppress(OSError):  # nothing to read, or closed
            return self._pipe is not None and any(n in stop_signals() for n in os.read(self._pipe[0], 4096))
        return False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ignores_requeue and number != signal.SIGINT:
            return
        is_impatient = False
        if number != signal.SIGINT:
            self.requeue = True
        elif self.interrupt:
            is_impatient = time.monotonic() - self._interrupted_at > IMPATIENT_S
        else:
            self.interrupt = True
            self._interrupted_at = time.monotonic()
        if is_impatient or not self._deferred:
            if imports_torch(frame):  # the import could lose the exception; there is nothing to save or close yet
                os._exit(self.code)
            self._deferred = True
            raise Stopped(self.code)


def stop_signals() -> tuple[int, ...]:
    return signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
