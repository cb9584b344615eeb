"""Files that a thread writes while training continues."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.checkpoint.background_writer import BackgroundWriter

A = Path("a")
B = Path("b")


class BlockingDisk:
    """Records what is written; the first write blocks until it is released."""

    def __init__(self) -> None:
        self.written: list[tuple[Path, int]] = []
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.fails = threading.Event()

    def __call__(self, content: int, path: Path) -> None:
        self.started.set()
        assert self.go_on.wait(60)
        if content < 0:
            self.fails.set()
            raise OSError("full")
        self.written.append((path, content))


def test_submitting_does_not_block_and_newer_content_replaces_waiting_content():
    disk = BlockingDisk()
    writer = BackgroundWriter(disk)
    writer.submit({A: 1})
    assert disk.started.wait(60)
    for content in range(2, 6):
        writer.submit({B: content, A: content})
    writer.submit({A: 6})
    disk.go_on.set()
    writer.flush()
    assert disk.written == [(A, 1), (B, 5), (A, 6)]
    writer.submit({A: 7})  # a new thread continues
    writer.flush()
    assert disk.written[-1] == (A, 7)


def test_a_disk_that_is_slower_than_the_epochs_starves_no_file():
    """Each epoch is the best and ends while best.pt is being written: last.pt is written as often."""
    writes: list[tuple[Path, int]] = []

    def write(content: int, path: Path) -> None:
        writes.append((path, content))
        if path == A and content < 5:
            writer.submit({A: content + 1, B: content + 1})

    writer = BackgroundWriter(write)
    writer.submit({A: 1, B: 1})
    while writer.is_busy:
        writer.wait()
    assert writes == [(path, epoch) for epoch in range(1, 6) for path in (A, B)]


def test_an_error_is_raised_once_and_waiting_content_is_dropped():
    disk = BlockingDisk()
    writer = BackgroundWriter(disk)
    writer.submit({A: -1})
    assert disk.started.wait(60)
    writer.submit({B: 1})
    disk.go_on.set()
    writer.wait()
    with pytest.raises(OSError, match="full"):
        writer.check()
    writer.flush()
    assert disk.written == []


def test_an_error_while_files_are_being_submitted_drops_all_of_them():
    disk = BlockingDisk()

    class FilesDuringTheError(dict[Path, int]):
        def __contains__(self, path: object) -> bool:  # `submit` looks for older content of these files
            disk.go_on.set()
            assert disk.fails.wait(60)
            return super().__contains__(path)

    writer = BackgroundWriter(disk)
    writer.submit({A: -1})
    assert disk.started.wait(60)
    writer.submit({B: 1})
    writer.submit(FilesDuringTheError({A: 2}))
    writer.wait()
    with pytest.raises(OSError, match="full"):
        writer.flush()
    assert disk.written == []
