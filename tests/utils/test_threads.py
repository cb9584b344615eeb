from __future__ import annotations

import threading
from pathlib import Path

import pytest

from utils.threads import BackgroundWriter

A, B = Path("a"), Path("b")


class Disk:
    """Records what is written; the first write blocks until it is released."""

    def __init__(self) -> None:
        self.written: list[tuple[Path, int]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, content: int, path: Path) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        if content < 0:
            raise OSError("full")
        self.written.append((path, content))


def test_submitting_does_not_block_and_newer_content_replaces_pending_content():
    disk = Disk()
    writer = BackgroundWriter(disk)
    writer.submit({A: 1})
    assert disk.begun.wait(10)
    for content in range(2, 6):
        writer.submit({B: content, A: content})
    writer.submit({A: 6})
    disk.go_on.set()
    writer.finish()
    assert disk.written == [(A, 1), (B, 5), (A, 6)]
    writer.submit({A: 7})  # a new thread continues
    writer.finish()
    assert disk.written[-1] == (A, 7)


def test_an_error_is_raised_once_and_pending_content_is_dropped():
    disk = Disk()
    writer = BackgroundWriter(disk)
    writer.submit({A: -1})
    assert disk.begun.wait(10)
    writer.submit({B: 1})
    disk.go_on.set()
    writer.wait()
    with pytest.raises(OSError, match="full"):
        writer.check()
    writer.finish()
    assert disk.written == []
