"""Captures what image decoders print on standard error, so that a warning can be attributed to a file.

libjpeg decodes a damaged image to the end, prints one line without a file name and reports success. While an image is
decoded, file descriptor 2 is redirected to memory; lines of decoders are captured, and everything else (from other
threads) is forwarded. This takes a few system calls per image, microseconds compared to milliseconds of decoding.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import threading
from collections.abc import Callable
from typing import BinaryIO, TypeVar

T = TypeVar("T")

# Lines of libjpeg (jerror.h) and libpng, and errors that OpenCV logs (for example of libtiff), that mean lost or wrong
# pixels. Other lines are harmless.
_DAMAGE = re.compile(
    rb"Corrupt JPEG data: (?!bad ICC)[^\n]*|Premature end of JPEG file|Inconsistent progression[^\n]*"
    rb"|libpng error: [^\n]*|\[ERROR:\d+@[^\]]*\] global \w+\.\w+:\d+ (?P<logged>[^\n]*)"
)
_FROM_DECODERS = re.compile(
    rb"(?:Corrupt JPEG data: |Premature end of JPEG file|Inconsistent progression sequence |Invalid SOS parameters "
    rb"|Unknown Adobe color |Warning: unknown JFIF |Application transferred |libpng (?:warning|error): "
    rb"|\[ ?(?:WARN|ERROR):\d+@)[^\n]*\n?"
)


def watched(decode: Callable[[], T]) -> tuple[T, str]:
    """Returns the result of ``decode`` and the decoder's warning about the image, "" if there was none.

    If several threads decode at once, a warning may belong to any of them; the image is then decoded again, alone.
    """
    process = os.getpid()  # a forked child needs its own
    watch = _watches.get(process) or _watches.setdefault(process, _Watch())  # one, even if threads race
    result, warning, is_certain = watch.run(decode, alone=False)
    if warning and not is_certain:
        result, warning, _ = watch.run(decode, alone=True)
    return result, warning


def pass_on() -> None:
    """Forwards what has been captured and restores standard error, although threads may still decode: for a process
    that is about to end. Errors are ignored."""
    if watch := _watches.get(os.getpid()):
        with contextlib.suppress(OSError, MemoryError):
            watch.pass_on()


_watches: dict[int, _Watch] = {}  # by process id


class _Watch:
    """Redirects descriptor 2 while at least one thread decodes."""

    def __init__(self) -> None:
        self._file = _anonymous_file()
        self._memory = self._file.fileno()
        self._changed = threading.Condition()
        self._inside = 0  # threads that decode now
        self._entries = 0  # calls of `_enter` so far
        self._waiting_alone = 0  # threads that wait to decode alone
        self._is_alone = False
        self._passed_on = 0  # bytes of the memory that have been forwarded
        self._terminal = -1  # a copy of the original descriptor 2; -1 if it was closed

    def run(self, decode: Callable[[], T], *, alone: bool) -> tuple[T, str, bool]:
        """Returns the result, the first warning in the meantime, and whether no other thread decoded then."""
        start, entry, is_certain = self._enter(alone)
        try:
            result = decode()
        finally:
            with self._changed:
                try:
                    text = os.pread(self._memory, max(self._size() - start, 0), start)
                    is_certain = is_certain and self._entries == entry
                finally:
                    self._leave()
        found = _DAMAGE.search(text)
        warning = (found["logged"] or found[0]).decode("latin-1") if found else ""
        return result, warning, is_certain

    def _enter(self, alone: bool) -> tuple[int, int, bool]:
        with self._changed:
            if alone:
                self._waiting_alone += 1
                self._changed.wait_for(lambda: not self._inside)
                self._waiting_alone -= 1
            else:
                self._changed.wait_for(lambda: not (self._is_alone or self._waiting_alone))
            if not self._inside:
                try:
                    self._terminal = os.dup(2)
                except OSError as error:
                    if error.errno != errno.EBADF:  # it is not closed, but no more files can be opened
                        raise
                    self._terminal = -1
                os.dup2(self._memory, 2)
            self._is_alone = alone
            self._inside += 1
            self._entries += 1
            return self._size(), self._entries, self._inside == 1

    def pass_on(self) -> None:
        if not self._changed.acquire(timeout=1.0):
            return
        try:
            if self._inside and self._terminal >= 0:
                os.dup2(self._terminal, 2)
                self._pass_on()
        finally:
            self._changed.release()

    def _leave(self) -> None:
        self._inside -= 1
        self._is_alone = False
        try:
            self._pass_on()
        finally:
            if not self._inside:
                if self._terminal >= 0:
                    os.dup2(self._terminal, 2)
                    os.close(self._terminal)
                else:  # it was closed
                    os.close(2)
                os.ftruncate(self._memory, 0)
                self._passed_on = 0
                self._changed.notify_all()

    def _size(self) -> int:
        return os.fstat(self._memory).st_size

    def _pass_on(self) -> None:
        size = self._size()
        if size == self._passed_on:
            return
        text = _FROM_DECODERS.sub(b"", os.pread(self._memory, size - self._passed_on, self._passed_on))
        self._passed_on = size
        if text and self._terminal >= 0:
            os.write(self._terminal, text)


def _anonymous_file() -> BinaryIO:
    """A file without a name, in append mode."""
    import fcntl

    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("lockstep-stderr")
    else:
        with tempfile.TemporaryFile() as temporary:
            handle = os.dup(temporary.fileno())
    file = os.fdopen(handle, "r+b", buffering=0)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
