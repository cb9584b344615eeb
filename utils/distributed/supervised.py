"""A process whose work is done by a child, so that a launcher does not notice if the child dies or hangs.

torchrun, mpirun and `spawn` end all processes when one of them fails. The process that they have started waits here
instead, which takes no torch and little memory, and succeeds whatever happens to its child.
"""

from __future__ import annotations

import os
import signal
import time

from utils.distributed.spawn import end_with_parent, signal_name
from utils.errors import PeerFailure, UserError
from utils.machine.stop_signals import stop_signals

BEAT_S, HANGS_AFTER_S = 1.0, 30.0
_POLL_S = 0.2


class Pulse:
    """The child's end: after the first `beat`, its failure is not that of the launched process any more, and it is
    killed when it has not called `beat` for `HANGS_AFTER_S`."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def beat(self) -> None:
        os.write(self._pipe, b".")


def work_in_child() -> Pulse | None:
    """Forks. Returns twice: a `Pulse` in the child, and None in this process when the child has ended.

    A stop signal, or the end of the launcher, ends the child.

    Raises:
        PeerFailure: the child has failed before its first beat, and has printed why.
        UserError: it was killed before its first beat.
    """
    reading, writing = os.pipe()
    parent, child = os.getppid(), os.fork()
    if child == 0:
        os.close(reading)
        end_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this process
        return Pulse(writing)
    os.close(writing)
    os.set_blocking(reading, False)
    status, has_beaten, is_stopped = _wait(child, reading, parent)
    os.close(reading)
    if status and not has_beaten and not is_stopped:
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            raise UserError(f"an evaluating process was killed by {signal_name(-code)}; is there enough memory?")
        raise PeerFailure("an evaluating process has failed")
    return None


def _wait(child: int, beats: int, parent: int) -> tuple[int, bool, bool]:
    """Waits for the child, or ends it. Returns its status, whether it has beaten, and whether a signal came."""
    received: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda number, _: received.append(number))
    beat_at: float | None = None
    while True:
        time.sleep(_POLL_S)
        try:
            beat_at = time.monotonic() if os.read(beats, 4096) else beat_at
        except BlockingIOError:
            pass
        ended, status = os.waitpid(child, os.WNOHANG)
        is_silent = beat_at is not None and time.monotonic() - beat_at > HANGS_AFTER_S
        if not ended and (received or is_silent or os.getppid() != parent):
            os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0)
        if ended:
            return status, beat_at is not None, bool(received)
