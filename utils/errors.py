"""Exceptions that the entry scripts turn into one line and an exit code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

MAX_CHARACTERS = 1200
# Exit codes of stopped runs: EX_TEMPFAIL of sysexits.h, and that of shells after Ctrl-C.
REQUEUE, INTERRUPTED = 75, 130


class UserError(Exception):
    """A mistake in the user's input: files, flags, YAML, devices, ports, disks.

    The message is one line that names what is wrong, where (file and line if there is one), and what to do.
    Entry scripts print it as ``error: <message>`` and exit with code 2. The middle of a very long message, which may
    quote a file, is left out.
    """

    def __init__(self, message: str) -> None:
        if len(message) > MAX_CHARACTERS:
            message = f"{message[: MAX_CHARACTERS * 2 // 3]} ... {message[-MAX_CHARACTERS // 4 :]}"
        super().__init__(message)


@contextlib.contextmanager
def errors_of(path: str | os.PathLike) -> Iterator[None]:
    """Prefixes the UserErrors of the block with ``path``, unless they already name it."""
    try:
        yield
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from None


class FailedCheck(UserError):
    """What the program made did not pass a check. Entry scripts exit with code 1."""


class PeerFailure(UserError):
    """Another process of the run failed and has printed why; this process exits without repeating it."""


class Stopped(Exception):
    """The run was stopped by a signal, after saving its state; ``code`` is the exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
