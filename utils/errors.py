"""The one exception that means "the user can fix this"."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

MOST_CHARACTERS = 1200


class UserError(Exception):
    """A mistake in the user's input: files, flags, YAML, devices, ports, disks.

    The message is one line that names what is wrong, where (file and line if there is one), and what to do.
    Entry scripts print it as ``error: <message>`` and exit with code 2. A message that quotes a file may be long; its
    middle is left out then.
    """

    def __init__(self, message: str) -> None:
        if len(message) > MOST_CHARACTERS:
            message = f"{message[: MOST_CHARACTERS * 2 // 3]} ... {message[-MOST_CHARACTERS // 4 :]}"
        super().__init__(message)


@contextlib.contextmanager
def errors_of(path: str | os.PathLike) -> Iterator[None]:
    """Has UserErrors of the block begin with the file that their cause is in, where they do not name it."""
    try:
        yield
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from None


class PeerFailure(UserError):
    """Another process of the run failed and has printed why; this one ends without repeating it."""


class Stopped(Exception):
    """A signal asked the run to stop and it did, with what it had done saved; ``code`` is for the exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
