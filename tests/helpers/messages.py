"""Checks error messages, each in one line next to the input that provokes it."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator

import pytest

from utils.errors import UserError

ANYTHING = "..."


def matches(message: str, expected: str) -> bool:
    """Returns whether ``message`` ends with ``expected``, where ``...`` stands for any text, or none.

    ``expected`` must say something: only ``...`` is no expectation.
    """
    assert expected.strip(ANYTHING), "write the end of the message"
    pattern = ".*".join(re.escape(part) for part in expected.split(ANYTHING))
    return re.search(f"{pattern}$", message) is not None


@contextlib.contextmanager
def refused(
    expected: str, error: type[BaseException] | tuple[type[BaseException], ...] = UserError
) -> Iterator[pytest.ExceptionInfo]:
    """Checks that the block raises ``error`` with a one-line message that ends with ``expected``.

    ``...`` stands for any text, such as a temporary folder. The beginning of a message, such as the folder of the file
    that it names, need not be written. Control characters are expected as Python escapes them.
    """
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message, message
    message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    if not matches(message, expected):
        lines = "\n".join(difflib.ndiff([expected], [message]))
        pytest.fail(f"another message than expected:\n{lines}")
