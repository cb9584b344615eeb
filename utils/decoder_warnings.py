"""What image decoders print on standard error: caught, so that it can be told of which file it is.

libjpeg decodes a damaged picture to the end, prints one line without a file name and reports success. While a picture
is decoded, file descriptor 2 leads to memory; what decoders print there is kept, whatever else was written in the
meantime (by other threads) is passed on. That costs a few system calls a picture, microseconds against milliseconds.
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

# Lines of libjpeg (jerror.h) and libpng, and errors that OpenCV logs (of libtiff among others), that tell of lost or
# wrong pixels; of others the picture is none the worse.
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
    """What ``decode`` returns, and the decoder's complaint about the picture, "" if there was none.

    Where several threads decode at once, a complaint could be any one's: a picture in doubt is decoded again, alone.
    """
    watch = _watch_of_this_process()
    result, complaint, is_certain = watch.run(decode, alone=False)
    if complaint and not is_certain:
        result, complaint, _ = watch.run(decode, alone=True)
    return result, complaint


def pass_on() -> None:
    """Prints what was written on standard error meanwhile, and leads it where it led before, whatever threads decode
    still: for a process that is about to end. What fails is passed over."""
    if watch := _watches.get(os.getpid()):
        with contextlib.suppress(OSError, MemoryError):
            watch.pass_on()


def _watch_of_this_process() -> _Watch:
    """One alone, also where several threads ask first; a fork gets its own."""
    process = os.getpid()
    return _watches.get(process) or _watches.setdefault(process, _Watch())


_watches: dict[int, _Watch] = {}  # by process


class _Watch:
    """Descriptor 2 while at least one thread decodes."""

    def __init__(self) -> None:
        self._file = _anonymous_file()
        self._memory = self._file.fileno()
        self._changed = threading.Condition()
        self._inside = 0  # threads that decode
        self._entries = 0  # how many have begun to
        self._wants_alone = 0
        self._is_alone = False
        self._passed_on = 0  # bytes of the memory that have been looked through
        self._terminal = -1  # what descriptor 2 was

    def run(self, decode: Callable[[], T], *, alone: bool) -> tuple[T, str, bool]:
        """The result, the first complaint while it was made, and whether nobody else decoded then."""
        start, entry, is_certain = self._enter(alone)
        complaint = ""
        try:
            result = decode()
        finally:
            with self._changed:
                try:
                    text = os.pread(self._memory, max(self._size() - start, 0), start)
                    is_certain = is_certain and self._entries == entry
                finally:
                    self._leave()
        found = _DAMAGE.search(text) if text else None
        if found:
            complaint = (found["logged"] or found[0]).decode("latin-1")
        return result, complaint, is_certain

    def _enter(self, alone: bool) -> tuple[int, int, bool]:
        with self._changed:
            if alone:
                self._wants_alone += 1
                self._changed.wait_for(lambda: not self._inside)
                self._wants_alone -= 1
            else:
                self._changed.wait_for(lambda: not (self._is_alone or self._wants_alone))
            if not self._inside:
                self._terminal = _copy_of(2)
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


def _copy_of(descriptor: int) -> int:
    """-1 where it is closed. Raises OSError where no more files can be opened."""
    try:
        return os.dup(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return -1


def _anonymous_file() -> BinaryIO:
    """A file without a name; writes go to its end."""
    import fcntl

    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("lockstep-stderr")
    else:
        with tempfile.TemporaryFile() as temporary:
            handle = os.dup(temporary.fileno())
    file = os.fdopen(handle, "r+b", buffering=0)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
