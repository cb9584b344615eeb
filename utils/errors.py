"""Exceptions that the entry scripts turn into one line and an exit code, and the exit codes of all commands."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from utils.address import with_short_addresses

CHECK_FAILED = 1  # a result failed its check, or tools.check found issues
BUG = 1  # with a traceback, as of Python itself
USER_ERROR = 2  # a user's mistake, or a limit of the machine; also argparse's code
LOST_PEER = 3  # of a process of ``--spawn``, which leaves it to its parent to say how another one has ended
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a signal stopped a training run, which can be resumed
INTERRUPTED = 130  # Ctrl-C, as in shells

MAX_MESSAGE_CHARACTERS = 1200
MAX_MISTAKES = 10  # in one message
# Control characters, line and paragraph separators, and those that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")


def one_line(text: str) -> str:
    """Replaces each run of line breaks and other control characters, which would split log lines or control the
    terminal, with a space. Lone surrogates, which are not UTF-8 (file names can contain any bytes), are escaped."""
    return _CONTROL.sub(" ", text).encode("utf-8", "backslashreplace").decode("utf-8")


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message, or the name of its type if it has none."""
    message = ""
    with contextlib.suppress(Exception):  # a class of the user may have no text
        message = str(error).strip()
    return next(iter(message.splitlines()), type(error).__name__)


def os_reason(error: OSError) -> str:
    """Returns why the system refused, in lower case: ``no such file or directory``."""
    return (error.strerror or str(error)).lower()


class ExplainedError(Exception):
    """An error whose message explains it fully. It is not a bug, so no traceback is printed. The message shows URLs
    without what may be secret in them."""

    def __init__(self, message: str) -> None:
        super().__init__(with_short_addresses(message))


class UserError(ExplainedError):
    """A mistake in the user's input: files, flags, YAML, devices, ports, disks.

    The message is one line that states what is wrong, where (file and line, if any), and what to do. Entry scripts
    print it as ``error: <message>`` and exit with code 2. The middle of a very long message, which may quote a file, is
    omitted unless ``whole``. ``parts`` are the single messages if this one joins several.
    """

    def __init__(self, message: str, *, whole: bool = False, parts: Sequence[str] = ()) -> None:
        message = with_short_addresses(message)  # as long as they are whole
        if len(message) > MAX_MESSAGE_CHARACTERS and not whole:
            message = f"{message[: MAX_MESSAGE_CHARACTERS * 2 // 3]} ... {message[-MAX_MESSAGE_CHARACTERS // 4 :]}"
        super().__init__(message)
        self.parts = tuple(parts)


class PeerLost(UserError):
    """Another process of the run was killed, hangs or did not join. A UserError, because the user may have to free
    memory or fix an address."""


class Mistakes:
    """Collects the user errors of several checks, so that one message names all of them."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        self.add_error(UserError(message))

    def add_error(self, error: UserError) -> None:
        """Adds the messages of an error."""
        self.messages += error.parts or (str(error),)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Adds a UserError raised in the block instead of propagating it."""
        try:
            yield
        except UserError as error:
            self.add_error(error)

    def __bool__(self) -> bool:
        return bool(self.messages)

    @property
    def are_many(self) -> bool:
        """True if there are more messages than are shown at once."""
        return len(self.messages) > MAX_MISTAKES

    def raise_any(self) -> None:
        """Raises UserError with the first messages, numbered if there are several. Does nothing if there are none."""
        first = "the first " if self.are_many else ""
        del self.messages[MAX_MISTAKES:]
        if len(self.messages) == 1:
            raise UserError(self.messages[0], whole=True)
        if self.messages:
            numbered = (f"({number}) {message}" for number, message in enumerate(self.messages, 1))
            message = f"{first}{len(self.messages)} mistakes: {'; '.join(numbered)}"
            raise UserError(message, whole=True, parts=self.messages)


@contextlib.contextmanager
def all_mistakes() -> Iterator[Mistakes]:
    """Yields a collector, and at the end of the block raises one UserError for all collected mistakes."""
    mistakes = Mistakes()
    yield mistakes
    mistakes.raise_any()


def refuse(table: Iterable[tuple[object, str]]) -> None:
    """Raises one UserError for all rows of a table of conditions and messages whose condition is true."""
    with all_mistakes() as mistakes:
        for condition, message in table:
            if condition:
                mistakes.add(message)


@contextlib.contextmanager
def errors_of(path: str | os.PathLike) -> Iterator[None]:
    """Prefixes the UserErrors of the block with ``path``, unless they already name it."""
    try:
        yield
    except UserError as error:
        if str(path) in str(error):
            raise
        parts = [f"{path}: {part}" for part in error.parts]
        raise UserError(f"{path}: {error}", whole=True, parts=parts) from None


class FailedCheck(ExplainedError):
    """Raised when a result of the program fails its check. Entry scripts exit with code 1."""


class PeerFailure(ExplainedError):
    """Another process of the run failed and reported why. This process exits with ``code`` without repeating it."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Stopped(BaseException):
    """A signal stopped the program; a training run has saved its state. ``code`` is the exit status. Like
    KeyboardInterrupt, it is not an `Exception`, so that no handler mistakes it for an error of the code it
    interrupts."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
