"""A lock in a file that says who holds it, and that ends with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from pathlib import Path

_LOOK_EVERY_S = 0.1


class FileLock:
    """Held by one process of all machines that see the file, from `acquire` to `release` or the process's end.

    A record lock (fcntl's ``lockf``): unlike ``flock`` it is not handed on to forked children, such as loader
    processes, that outlive a killed parent for a while; and network file systems know it. It holds nothing off in its
    own process. Where the file system or the operating system has no locks, `acquire` always succeeds.
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

    def release(self) -> None:
        """Gives the lock back if it is held, and removes the file."""
        if self._descriptor < 0:
            return
        self._give_back(self._descriptor)
        self._descriptor = -1

    def _try(self) -> str:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _lock(descriptor):
                holder = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip()
                os.close(descriptor)
                return holder or "another process"
            if _is_still_named(descriptor, self.path):
                break
            os.close(descriptor)  # its holder removed it between our opening and our locking it
        since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}, since {since}\n".encode(), 0)
        except OSError:  # a full disk
            self._give_back(descriptor)
            raise
        self._descriptor = descriptor
        return ""

    def _give_back(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            if _is_still_named(descriptor, self.path):  # the folder may be gone, and another made in its place
                self.path.unlink()
        with contextlib.suppress(OSError):  # it is closed, and with that unlocked, whatever the disk says
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """False where another process has it."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True


def _is_still_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
