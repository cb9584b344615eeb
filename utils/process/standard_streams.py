"""Lets a command complete its work even if a standard stream is closed, full or no longer read."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_errors: list[OSError] = []  # errors of standard output in this process


class _Output(io.FileIO):
    """The file of a standard stream. Drops data that cannot be written, and records the error if the stream is standard
    output (``is_output``)."""

    def __init__(self, descriptor: int, *, is_output: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._is_output = is_output

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self._is_output:
                _errors.append(error)
            return memoryview(data).nbytes


class _Unbuffered(io.BufferedWriter):
    """Flushes every write, as streams do under ``python -u`` or PYTHONUNBUFFERED."""

    def write(self, data: ReadableBuffer, /) -> int:
        count = super().write(data)
        self.flush()
        return count


def tolerate_broken_streams() -> None:
    """Makes standard output and standard error ignore write errors. `output_error` returns those of standard output.

    Opens /dev/null in place of closed streams. Otherwise the next opened file would get a closed stream's descriptor,
    and receive the output of libraries.
    """
    _errors.clear()
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            _open_null(number, name, flags)
        elif number and getattr(sys, name) is getattr(sys, f"__{name}__"):  # else a notebook or a test replaced it
            _replace(name)


def output_error() -> OSError | None:
    """Flushes standard output. Returns its first error, or None if everything was written."""
    with contextlib.suppress(ValueError):  # closed
        sys.stdout.flush()
    return _errors[0] if _errors else None


def _open_null(number: int, name: str, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != number:
        try:
            os.fstat(number)  # in use: an import has opened a file that stays open
        except OSError:
            os.dup2(null, number)
    os.set_inheritable(null, True)
    _set(name, os.fdopen(null, "r" if flags == os.O_RDONLY else "w", encoding="utf-8", closefd=False))


def _replace(name: str) -> None:
    stream = getattr(sys, name)
    try:
        stream.flush()
        output = _Output(stream.fileno(), is_output=name == "stdout")
    except (OSError, ValueError):
        return
    buffer = _Unbuffered(output) if stream.write_through else io.BufferedWriter(output)
    replacement = io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    _set(name, replacement)


def _set(name: str, stream: Any) -> None:
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
