"""Captures the standard error of image decoders, so that a warning can be attributed to a file.

libjpeg decodes a damaged image to the end, prints one line without a file name and reports success. While an image is
decoded, file descriptor 2 is redirected to memory; decoders' lines are captured, and everything else is forwarded. This
takes a few system calls per image: microseconds, compared to milliseconds of decoding.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Lines of libjpeg (jerror.h) and libpng, and errors logged by OpenCV (for example from libtiff), that mean lost or
# wrong pixels. Other lines are harmless.
_DAMAGE = re.compile(
    rb"Corrupt JPEG data: (?!bad ICC)[^\n]*|Premature end of JPEG file|Inconsistent progression[^\n]*"
    rb"|libpng error: [^\n]*|\[ERROR:\d+@[^\]]*\] global \w+\.\w+:\d+ (?P<logged>[^\n]*)"
)
_FROM_DECODERS = re.compile(
    rb"(?:Corrupt JPEG data: |Premature end of JPEG file|Inconsistent progression sequence |Invalid SOS parameters "
    rb"|Unknown Adobe color |Warning: unknown JFIF |Application transferred |libpng (?:warning|error): "
    rb"|\[ ?(?:WARN|ERROR):\d+@)[^\n]*\n*(?:>[^\n]*\n*)*"  # OpenCV continues a message on lines that begin with ">"
)


def capture_warning(decode: Callable[[], T]) -> tuple[T, str]:
    """Returns the result of ``decode`` and the decoder's warning about the image, or "". After a warning, which may
    belong to another thread's image, the image is decoded again while no other thread decodes."""
    process = os.getpid()  # a forked child needs its own redirection
    redirection = _redirections.get(process)
    if redirection is None:
        redirection = _redirections.setdefault(process, _StderrRedirection())  # the first one, if threads race
    result, output = redirection.run(decode)
    if _DAMAGE.search(output):
        result, output = redirection.run_alone(decode)
    damage = _DAMAGE.search(output)
    if damage is None:
        return result, ""
    return result, (damage["logged"] or damage[0]).decode("latin-1")


def flush_captured() -> None:
    """Forwards captured output and restores standard error before this process ends."""
    redirection = _redirections.get(os.getpid())
    if redirection is not None:
        with contextlib.suppress(OSError):
            redirection.restore()


_redirections: dict[int, _StderrRedirection] = {}  # by process id


class _StderrRedirection:
    """Redirects descriptor 2 while at least one thread decodes.

        no thread   --_enter-->   redirected, ``_num_decoding`` threads   --last _leave-->   no thread

    `_forward` copies other output to the terminal at each `_decode`. A thread in `run_alone` holds the gate: it
    waits until no other thread decodes, and none can enter until it has finished.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # in memory: the disk may be full
            self._file = os.fdopen(os.memfd_create("stderr"), "r+b", 0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        # A write that another thread began before the file was truncated must not land behind a gap.
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
        self._gate = threading.Lock()  # held by a thread that decodes alone
        self._changed = threading.Condition()
        self._num_decoding = 0  # threads that decode now
        self._forwarded = 0  # bytes of the file
        self._terminal = -1  # a copy of the original descriptor 2

    def run(self, decode: Callable[[], T]) -> tuple[T, bytes]:
        """Runs ``decode``. Returns its result, and what the decoders of all threads have written meanwhile."""
        with self._gate:
            start = self._enter()
        return self._decode(decode, start)

    def run_alone(self, decode: Callable[[], T]) -> tuple[T, bytes]:
        """Does the same as `run` while no other thread decodes."""
        with self._gate:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_decoding)
            return self._decode(decode, self._enter())

    def restore(self) -> None:
        """Restores the process's standard error, and forwards what is still captured. The process ends next, so threads
        still count as decoding."""
        with self._changed:
            if self._num_decoding:
                os.dup2(self._terminal, 2)
                self._forward()

    def _enter(self) -> int:
        """Redirects descriptor 2 if this thread is the first. Returns the file's size, where this thread's output
        begins."""
        with self._changed:
            if not self._num_decoding:
                self._terminal = os.dup(2)
                os.dup2(self._file.fileno(), 2)
            self._num_decoding += 1
            return self._size()

    def _decode(self, decode: Callable[[], T], start: int) -> tuple[T, bytes]:
        """Runs ``decode`` after `_enter`, which returned ``start``, and leaves."""
        try:
            result = decode()
        finally:
            with self._changed:
                try:
                    output = os.pread(self._file.fileno(), self._size() - start, start)
                    self._forward()
                finally:
                    self._leave()
        return result, output

    def _leave(self) -> None:
        """Restores descriptor 2 and empties the file if this thread is the last."""
        self._num_decoding -= 1
        if not self._num_decoding:
            os.dup2(self._terminal, 2)
            os.close(self._terminal)
            self._file.truncate(0)
            self._forwarded = 0
            self._changed.notify_all()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _forward(self) -> None:
        """Writes new lines that are not from decoders to the terminal."""
        new = os.pread(self._file.fileno(), self._size() - self._forwarded, self._forwarded)
        self._forwarded += len(new)
        other_output = _FROM_DECODERS.sub(b"", new)
        if other_output:
            os.write(self._terminal, other_output)
