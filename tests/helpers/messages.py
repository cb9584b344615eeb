"""Error messages that tests provoke are compared as a whole with one file, tests/messages.txt.

The file can be read in one go; a changed message shows as one changed line. ``pytest --renew-messages [paths]`` writes
what the tests that it runs provoke, and drops the messages of tests that are gone.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.errors import UserError

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "tests" / "messages.txt"
_PATTERNS = (  # what differs from run to run
    (r"\b(127\.0\.0\.1|localhost):\d+", r"\1:PORT"),
    (r"\b0x[0-9a-f]{8,}", "ADDRESS"),
    (r"\b(SESSION/[\w-]+?)\d+\b", r"\1"),
    (r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,64}\b", "DIGEST"),
    (rf"\blockstep-{os.getuid()}\b", "lockstep-UID"),
    (r"\b[\d.]+ [kMG]?B free\b", "N GB free"),
    # the reason that a library gives, which may be another in other versions
    (r"cannot be opened \(.*", "cannot be opened (...)"),
    (r"malformed JSON \(.*", "malformed JSON (...)"),
    (r"torch wrote opset \d+", "torch wrote opset N"),
)


def key_of(item: pytest.Item) -> str:
    """The id of the test, with a check sum in place of the end of a long one."""
    return item.nodeid if len(item.nodeid) <= 200 else f"{item.nodeid[:180]}...{zlib.crc32(item.nodeid.encode()):x}]"


class Messages:
    """What the tests of one process expect, and what they have provoked."""

    def __init__(self) -> None:
        self.renew = False
        self.expected: dict[str, list[str]] | None = None
        self.provoked: dict[str, list[str]] = {}
        self.collected: list[str] = []
        self._test, self._places = "", {}

    @contextlib.contextmanager
    def of_test(self, item: pytest.Item) -> Iterator[None]:
        """Fails if the test provokes fewer messages than it did."""
        folder = str(item.funcargs["tmp_path"])
        self._places = {folder: "TMP", os.path.dirname(folder): "SESSION", str(REPOSITORY): "REPOSITORY"}
        self._places |= {sys.prefix: "PYTHON"}
        self._test = key_of(item)
        provoked = self.provoked[self._test] = []
        try:
            yield
        except pytest.skip.Exception:  # what came before it counts
            raise
        except BaseException:
            del self.provoked[self._test]
            raise
        finally:
            test, self._test = self._test, ""
        if not self.renew and len(provoked) < len(expected := self.read().get(test, [])):
            pytest.fail(f"no longer provokes: {expected[len(provoked)]}\n{HOW_TO_RENEW}")

    def add(self, text: str) -> None:
        """Compares a message of the running test with the file."""
        __tracebackhide__ = True
        if not self._test:
            raise RuntimeError("refused() is for the process of the test, while it runs")
        for place, name in self._places.items():
            text = text.replace(place, name)
        for pattern, name in _PATTERNS:
            text = re.sub(pattern, name, text)
        assert "\n" not in text, text
        # names of files may be any bytes
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        provoked = self.provoked[self._test]
        provoked.append(text)
        if self.renew:
            return
        expected = self.read().get(self._test, [])
        before = expected[len(provoked) - 1] if len(provoked) <= len(expected) else ""
        if text != before:
            lines = "\n".join(difflib.ndiff([before], [text]))
            pytest.fail(
                f"message {len(provoked)} of this test is not that of tests/messages.txt:\n{lines}\n{HOW_TO_RENEW}"
            )

    def read(self) -> dict[str, list[str]]:
        """The messages of the file by the id of their test."""
        if self.expected is None:
            self.expected = {}
            file = test = ""
            for line in FILE.read_text(encoding="utf-8").split("\n") if FILE.exists() else ():
                if line.startswith(8 * " "):
                    self.expected[f"{file}::{test}"].append(line[8:])
                elif line.startswith(4 * " "):
                    test = line[4:]
                    self.expected[f"{file}::{test}"] = []
                else:
                    file = line
        return self.expected

    def write(self) -> None:
        """The file with what the tests have provoked."""
        known, files = set(self.collected), {test.partition("::")[0] for test in self.collected}
        kept = {
            test: texts
            for test, texts in self.read().items()
            if (REPOSITORY / (file := test.partition("::")[0])).exists() and (test in known or file not in files)
        }
        lines, last = [], ""
        for test, texts in sorted((kept | self.provoked).items()):
            file, _, name = test.partition("::")
            if texts:
                lines += [file] * (file != last) + [f"    {name}", *(f"        {text}" for text in texts)]
                last = file
        FILE.write_text("\n".join([*lines, ""]), encoding="utf-8")


HOW_TO_RENEW = "If the new message is right: pytest --renew-messages tests/FILE.py, and look at the change"
MESSAGES = Messages()


@contextlib.contextmanager
def refused(error: type[BaseException] | tuple[type[BaseException], ...] = UserError) -> Iterator[pytest.ExceptionInfo]:
    """The block must raise ``error``, with the message that tests/messages.txt holds for this test."""
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    MESSAGES.add(str(caught.value))
