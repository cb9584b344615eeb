"""Locks in files that end with the process that holds them, however that ends; a `FileLock` says who holds it.

All locks are BSD's ``flock``, which belongs to the open file. A record lock (``lockf``) belongs to the process: it is
lost when that closes any descriptor of the file (a cache is opened again and again), and holds nothing off in the
process itself. Linux carries flocks over NFS as locks of whole files, so they hold off other machines. Forked children
share an open file and would keep the lock of a parent that was killed: they close what a `FileLock` holds.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path

from utils.logger import get_logger

_LOOK_EVERY_S = 0.1
_held: set[int] = set()  # descriptors of this process's FileLocks
_closes_in_children = False


def flock(descriptor: int, *, shared: bool = False, waits: bool = False) -> None:
    """Locks an open file until its last descriptor is closed, in forked children too; changes the kind of a lock that
    it has.

    Raises BlockingIOError where another has it, unless it ``waits``; another OSError where the system, or the file
    system, has no locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system has no file locks") from None
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Removes files whose writers lock them and are gone; all stay where there are no locks."""
    for path in paths:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                flock(handle)
                os.unlink(path)
            finally:
                os.close(handle)


class FileLock:
    """Held once, among all machines that see the file, from `acquire` to `release` or the process's end.

    Where the file system or the operating system has no locks, `acquire` always succeeds.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor = -1

    def acquire(self, patience_s: float = 0.0) -> str:
        """Takes the lock and returns "", or returns who has it, once ``patience_s`` are over.

        Raises OSError naming the file where it cannot be written.
        """
        deadline = time.monotonic() + patience_s
        while holder := self._try():
            if time.monotonic() >= deadline:
                return holder
            time.sleep(_LOOK_EVERY_S)
        return ""

    def wait(self, what: str) -> None:
        """Takes the lock; while another has it, it is waited for, and a warning says so of ``what``. Raises OSError."""
        if holder := self.acquire():
            get_logger().warning("waiting for %s (%s)", what, holder)
            self.acquire(math.inf)

    def __enter__(self) -> FileLock:
        """Entered once it is taken."""
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives the lock back if this process holds it, and removes the file."""
        if self._descriptor not in _held:  # a child of the holder
            self._descriptor = -1
        if self._descriptor < 0:
            return
        self._give_back(self._descriptor)
        self._descriptor = -1

    def _try(self) -> str:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                flock(descriptor)
            except BlockingIOError:
                holder = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip()
                os.close(descriptor)
                return holder or "another process"
            except OSError:  # there are no locks
                pass
            if is_still_named(descriptor, self.path):
                break
            os.close(descriptor)  # its holder removed it between our opening and our locking it
        since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}, since {since}\n".encode(), 0)
        except OSError as error:  # a full disk
            self._give_back(descriptor)
            error.filename = str(self.path)
            raise
        self._descriptor = descriptor
        _close_in_children(descriptor)
        return ""

    def _give_back(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            if is_still_named(descriptor, self.path):  # the folder may be gone, and another made in its place
                self.path.unlink()
        _held.discard(descriptor)
        with contextlib.suppress(OSError):  # it is closed, and with that unlocked, whatever the disk says
            os.close(descriptor)


def _close_in_children(descriptor: int) -> None:
    global _closes_in_children
    if not _closes_in_children and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_held)
        _closes_in_children = True
    _held.add(descriptor)


def _close_held() -> None:
    """In a forked child; the parent keeps its locks."""
    while _held:
        os.close(_held.pop())


def is_still_named(descriptor: int, path: str | Path) -> bool:
    """Whether the open file has that name still, and not another that was put in its place."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
