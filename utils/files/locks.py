"""Exclusive file locks that name their holder and end with its process, however that ends.

They use BSD's ``flock``, which belongs to the open file. A record lock (``lockf``) would be lost when the process
closes any descriptor of the file. Linux maps flocks on NFS to whole-file locks, so they exclude other machines. Forked
children close the descriptors of `FileLock`; otherwise they would keep the lock of a killed parent.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import math
import os
import time
from pathlib import Path

from utils.files.safe_io import open_direct
from utils.logger import get_logger

POLL_S = 0.1
_held: set[int] = set()  # descriptors of this process's FileLocks


class FileLock:
    """A lock shared by all machines that see the file. If the file system has no locks, `acquire` always succeeds, and
    ``excludes_others`` is False. The holder may remove the file: processes that wait for it then lock a new one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.excludes_others = True  # for the last acquired lock
        self._descriptor = -1

    def acquire(self, patience_s: float = 0.0) -> str:
        """Acquires the lock and returns "", or returns a description of its holder after ``patience_s`` seconds. Raises
        OSError if the file cannot be opened for writing."""
        deadline = time.monotonic() + patience_s
        while holder := self._try():
            if time.monotonic() >= deadline:
                return holder
            time.sleep(POLL_S)
        return ""

    def wait(self, purpose: str) -> FileLock:
        """Acquires the lock, for a ``with`` statement. If it has to wait, logs a warning that names ``purpose``."""
        holder = self.acquire()
        if holder:
            get_logger().warning("waiting for %s (%s)", purpose, holder)
            self.acquire(math.inf)
        return self

    def __enter__(self) -> FileLock:
        """Does not acquire the lock. On exit it is released if it was acquired."""
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Releases the lock if this process holds it. The file is kept."""
        if self._descriptor in _held:  # else this is a child of the holder
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1

    def _try(self) -> str:
        """Tries to acquire the lock. Returns "" on success, else a description of the process that holds it."""
        descriptor = open_direct(self.path, os.O_RDWR | os.O_CREAT)
        self.excludes_others = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip()
            os.close(descriptor)
            return holder or "another process"
        except OSError:  # no locks on this file system
            self.excludes_others = False
        if self.excludes_others and not _is_at(self.path, descriptor):  # its holder has removed it meanwhile
            os.close(descriptor)
            return self._try()  # another process may lock a new file
        self._descriptor = descriptor
        _held.add(descriptor)
        _close_in_children()
        since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}, since {since}\n".encode(), 0)
        return ""


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether an open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@functools.cache
def _close_in_children() -> None:
    """Makes forked children close the descriptors; the parent keeps its locks."""
    os.register_at_fork(after_in_child=_close_held)


def _close_held() -> None:
    while _held:
        os.close(_held.pop())
